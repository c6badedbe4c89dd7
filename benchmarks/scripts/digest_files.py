"""Writes the adapters, heads and models that token_digests.py loads beside the default model.

All weights come from fixed seeds. Files that exist are kept, so that several versions of the package
read the same ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from torch import Tensor

_SHAPE = Path(__file__).parent.parent / "models" / "smollm2-135m"
_PAIR_LAYERS = 3  # of the draft model; the target's other layers add next to nothing
_QUIET = 0.0005
_DRAFT_VOCAB = 4096
_NUM_MEDUSA_HEADS = 3
_NOISE = 0.001


class ModelFiles:
    """Writes each file into `work` when it is first used, unless it exists."""

    exit_layer = _PAIR_LAYERS  # of the target: its first layers are the draft model

    def __init__(self, work: Path) -> None:
        self._work = work
        self._used: dict[str, Path] = {}
        work.mkdir(parents=True, exist_ok=True)

    def adapter(self, name: str) -> Path:
        """A PEFT adapter for all linear layers."""
        seed = sum(name.encode())
        return self._folder(f"adapter-{name}", lambda: _adapter(_config(), seed))

    def medusa(self) -> Path:
        return self._folder("medusa", lambda: _medusa(_config()))

    def eagle(self) -> Path:
        return self._folder("eagle", lambda: _eagle(_config()))

    def target(self) -> Path:
        """A model of random weights, whose first layers predict nearly what it predicts."""
        return self._model("target", quiet_from=_PAIR_LAYERS, quiet=_QUIET)

    def draft(self) -> Path:
        """The first layers of the target."""
        return self._model("draft", num_layers=_PAIR_LAYERS)

    def digests(self) -> dict[str, str]:
        """A digest of each file that was used; results are comparable only if these are equal."""
        return {name: _digest(path) for name, path in sorted(self._used.items())}

    def _folder(self, name: str, make: Callable[[], _Folder]) -> Path:
        path = self._work / name
        if not path.is_dir():
            made = make()
            part = path.with_name(f"{name}.part")
            part.mkdir(exist_ok=True)
            (part / f"{made.config_name}.json").write_text(json.dumps(made.config))
            save_file(made.tensors, part / f"{made.tensors_name}.safetensors")
            part.rename(path)
        self._used |= {f"{name}/{file.name}": file for file in path.iterdir()}
        return path

    def _model(self, name: str, **weights: Any) -> Path:
        path = self._work / f"{name}.gguf"
        if not path.is_file():
            # Only now: it reads parts of the engine that may differ between two versions.
            from random_gguf import StorageTypes, Weights, write_gguf

            part = path.with_suffix(".part")
            write_gguf(str(_SHAPE), StorageTypes("Q4_0", "Q8_0"), part, Weights(**weights))
            part.replace(path)
        self._used[path.name] = path
        return path


@dataclass(frozen=True, slots=True)
class _Folder:
    """The files of an adapter or a head."""

    config: Mapping[str, Any]
    tensors: dict[str, Tensor]
    config_name: str = "config"
    tensors_name: str = "model"


def _config() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_SHAPE / "config.json").read_text(encoding="utf-8"))
    return found


def _adapter(config: Mapping[str, Any], seed: int) -> _Folder:
    rank = 4 + 4 * (seed % 2)
    shapes = _layer_shapes(config, config["hidden_size"])
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for name, (num_out, num_in) in shapes.items():
            key = f"base_model.model.model.layers.{layer}.{name}.lora_"
            tensors[f"{key}A.weight"] = torch.randn(rank, num_in, generator=draw) * 0.05
            tensors[f"{key}B.weight"] = torch.randn(num_out, rank, generator=draw) * 0.05
    targets = [name.rpartition(".")[2] for name in shapes]
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
    described |= {"bias": "none", "base_model_name_or_path": "default"}
    return _Folder(described, tensors, "adapter_config", "adapter_model")


def _layer_shapes(config: Mapping[str, Any], num_in: int) -> dict[str, tuple[int, int]]:
    """(out, in) of a layer's linears; `num_in` is the input size of q, k and v."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    kv_heads = config["num_key_value_heads"] * config["head_dim"]
    return {
        "self_attn.q_proj": (heads, num_in),
        "self_attn.k_proj": (kv_heads, num_in),
        "self_attn.v_proj": (kv_heads, num_in),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }


def _medusa(config: Mapping[str, Any]) -> _Folder:
    """Heads that draft the last token again, which is right in repetitions."""
    size, draw = config["hidden_size"], torch.Generator().manual_seed(2)
    _, matrix = _norm_and_head()
    tensors = {"d2t": torch.zeros(_DRAFT_VOCAB, dtype=torch.int64)}
    for head in range(_NUM_MEDUSA_HEADS):
        tensors[f"{head}.0.linear.weight"] = torch.randn(size, size, generator=draw) * _NOISE
        tensors[f"{head}.0.linear.bias"] = torch.zeros(size)
        tensors[f"{head}.1.weight"] = matrix.clone()
    described = {
        "medusa_num_heads": _NUM_MEDUSA_HEADS,
        "medusa_num_layers": 1,
        "draft_vocab_size": _DRAFT_VOCAB,
    }
    return _Folder(described, tensors)


def _eagle(config: Mapping[str, Any]) -> _Folder:
    """A head that passes on the last layer's input, so that it drafts the last token again, too."""
    size, num_layers = config["hidden_size"], config["num_hidden_layers"]
    draw = torch.Generator().manual_seed(3)
    tensors = {
        f"midlayer.{name}.weight": torch.randn(shape, generator=draw) * _NOISE
        for name, shape in _layer_shapes(config, 2 * size).items()
    }
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = torch.ones(size)
    tensors["fc.weight"] = torch.cat([torch.zeros(size, 2 * size), torch.eye(size)], dim=1)
    tensors["norm.weight"], tensors["lm_head.weight"] = _norm_and_head()
    tensors["d2t"] = torch.zeros(_DRAFT_VOCAB, dtype=torch.int64)
    described = {
        **config,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": _DRAFT_VOCAB,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [2, num_layers // 2, num_layers - 1],
        },
    }
    return _Folder(described, tensors)


def _norm_and_head() -> tuple[Tensor, Tensor]:
    """The default model's last norm, and the first rows of its LM head."""
    # Only now, as in `ModelFiles._model`.
    from windlass.config import ModelConfig
    from windlass.models.source import resolve

    stored = {tensor.name: tensor for tensor in GGUFReader(resolve(ModelConfig()).path).tensors}
    norm, head = (
        torch.tensor(dequantize(stored[name].data, stored[name].tensor_type))
        for name in ("output_norm.weight", "token_embd.weight")
    )
    return norm, head[:_DRAFT_VOCAB].contiguous()


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:16]
