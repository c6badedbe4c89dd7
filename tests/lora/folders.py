"""A tiny model with random weights, and adapter folders in PEFT's format for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from windlass.lora.modules import linear_shapes
from windlass.models.families.registry import read_hparams

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "eos_token_id": 96,
}
SPEC = read_hparams(CONFIG)
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_model(folder: Path) -> Path:
    """A folder to load with load_format="dummy"."""
    folder.mkdir()
    words = {f"w{i}": i for i in range(96)} | {"<eos>": 96}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def lora_tensors(
    rank: int = 4, seed: int = 0, targets: Sequence[str] = ALL, middle: str = ""
) -> dict[str, Tensor]:
    """Both matrices of every module whose last name component is in `targets`."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (num_out, num_in) in linear_shapes(SPEC).items():
        if module.rpartition(".")[2] in targets:
            key = f"base_model.model.{module}.lora_"
            down = torch.randn(rank, num_in, generator=random) * 0.3
            up = torch.randn(num_out, rank, generator=random) * 0.3
            tensors |= {f"{key}A{middle}.weight": down, f"{key}B{middle}.weight": up}
    return tensors


def peft_config(
    rank: int = 4, targets: Sequence[str] | str = ALL, **changes: Any
) -> dict[str, Any]:
    listed = targets if isinstance(targets, str) else list(targets)
    common = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": listed}
    return common | {"bias": "none", "base_model_name_or_path": "tiny/base"} | changes


def write_adapter(
    folder: Path,
    rank: int = 4,
    seed: int = 0,
    targets: Sequence[str] = ALL,
    tensors: dict[str, Tensor] | None = None,
    **changes: Any,
) -> Path:
    """Write a complete adapter; `changes` are fields of its config."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(peft_config(rank, targets, **changes)))
    made = lora_tensors(rank, seed, targets) if tensors is None else tensors
    save_file(made, folder / "adapter_model.safetensors")
    return folder
