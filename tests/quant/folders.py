"""Tiny Llama folders, unquantised and quantised, and their logits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.quant.packers import Packed
from tests.steps import make_batch
from windlass.config import EngineConfig
from windlass.core.sampling import SamplingParams
from windlass.core.types import Row, SlotInit, StepPlan
from windlass.kernels.batch import KVCache
from windlass.models.card import load_hparams, open_checkpoint
from windlass.models.network import kv_layout
from windlass.models.source import resolve
from windlass.runner.load import Loaded, load_network
from windlass.runner.slots import SlotTables

HIDDEN, FFN, VOCAB = 128, 256, 97
IDS = [5, 17, 93, 2, 44, 61, 8, 8, 30, 72, 1]


def write_plain(folder: Path, tied: bool = False, seed: int = 1, **changes: Any) -> Path:
    """Write a model of two layers with random float32 weights. `changes` are of its config."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    config = transformers.LlamaConfig(**(sizes | changes), tie_word_embeddings=tied)
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    model.save_pretrained(folder)
    return folder


def rewrite(
    source: Path,
    target: Path,
    pack: Callable[[str, Tensor], Packed | None],
    quantization: Mapping[str, Any],
) -> tuple[Path, Path]:
    """Copy a folder twice: with quantised projections, and with their dequantised weights."""
    reference = target.with_name(target.name + "-plain")
    packed: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        found = pack(module, tensor) if module.endswith("_proj") else None
        plain[name] = tensor if found is None else found.weight.contiguous()
        if found is None:
            packed[name] = tensor
        else:
            packed |= {f"{module}.{key}": value for key, value in found.tensors.items()}
    config = json.loads((source / "config.json").read_text())
    for folder, tensors in ((target, packed), (reference, plain)):
        folder.mkdir()
        save_file(
            {key: value.contiguous() for key, value in tensors.items()},
            folder / "model.safetensors",
        )
        extra = {"quantization_config": dict(quantization)} if folder is target else {}
        (folder / "config.json").write_text(json.dumps(config | extra))
    return target, reference


def loaded(model: Path, **options: Any) -> Loaded:
    """Load a network as the engine does."""
    config = EngineConfig.of(model=str(model), **options)
    files = resolve(config.model)
    hparams = load_hparams(files, config.model)
    return load_network(config, hparams, open_checkpoint(files, config.model))


def logits(made: Loaded, ids: list[int] = IDS) -> Tensor:
    """Logits of every position of one prompt."""
    network, parts = made.network, made.parts
    hparams = load_hparams(resolve(made.config), made.config)
    layout = kv_layout(hparams, 16, parts.dtype, parts.mesh)
    num_groups = len(layout.groups)
    cache = KVCache(layout, 16 * num_groups, parts.dtype, parts.device)
    slots = SlotTables(1, 16, 16, parts.device, num_groups=num_groups)
    slot_init = SlotInit("r", 0, ids, len(ids), SamplingParams(), frozenset(), 0)
    blocks = tuple(range(-(-len(ids) // 16) * num_groups))
    plan = StepPlan([Row("r", 0, 0, len(ids), tuple(ids), blocks, True)], [slot_init])
    tokens, batch = make_batch(plan, slots, cache.layers)
    with torch.inference_mode():
        return network.logits(network(tokens, batch)).float()
