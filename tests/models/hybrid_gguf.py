"""Writes saved models with recurrent states as GGUF files, as llama.cpp's converter does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from tests.models.dense_gguf import TOKENIZER
from tests.models.tiny import Type, write_gguf

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
_SMALL = ("ssm_a", "ssm_d", "ssm_norm.weight", "conv1d.weight", "shortconv.conv.weight")


def write_hybrid(
    folder: Path,
    architecture: str,
    metadata: dict[str, Any],
    kind: Type = Type.F32,
    groups: int = 1,
) -> Path:
    """The model that was saved to the folder. `groups`: of the norm of Mamba-2.

    `metadata`: keys of the architecture beside or instead of the common ones.
    """
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    layers = config.get("num_hidden_layers") or len(config["layers_block_type"])
    epsilon = next(
        config[name]
        for name in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")
        if name in config
    )
    rope = config.get("rope_parameters", {})
    values = {
        "block_count": layers,
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": epsilon,
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": rope.get("rope_theta", 10000.0),
        **metadata,
    }
    keyed = {f"{architecture}.{key}": value for key, value in values.items()}
    kinds = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], layers)
    found: dict[str, np.ndarray] = {}
    for name, tensor in _stacked(load_file(folder / "model.safetensors")):
        own, values_of = _converted(name, tensor, groups)
        target = names.get_name(own, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        found[target] = np.ascontiguousarray(values_of.numpy())
    if config.get("tie_word_embeddings"):
        found.pop("output.weight", None)
    small = dict.fromkeys((*_SMALL, "_inp.weight"), Type.F32)
    return write_gguf(folder / "m.gguf", architecture, kind, found, keyed | TOKENIZER, small)


def _stacked(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, with those of all experts as one."""
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if match := _EXPERT.fullmatch(name):
            module = match[1].replace("backbone.", "model.").replace(".mixer.", ".mlp.")
            name = f"{module}.{match[3]}.weight"
            experts.setdefault(name, {})[int(match[2])] = tensor
        else:
            yield name, tensor
    for name, parts in experts.items():
        name = name.removeprefix("model.") if "feed_forward" in name else name
        yield name, torch.stack([parts[expert] for expert in range(len(parts))])


def _converted(name: str, tensor: torch.Tensor, groups: int) -> tuple[str, torch.Tensor]:
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        return name, tensor.squeeze(1)
    if name.endswith(".A_log"):
        return name, -tensor.exp()[:, None]
    if name.endswith(".D"):
        return name, tensor[:, None]
    if name.endswith(".dt_bias"):
        return name.replace(".dt_bias", ".dt_proj.bias"), tensor
    if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        return name, tensor.view(groups, -1)
    if name.endswith(".expert_bias"):
        return f"{name}.bias", tensor
    return name.replace(".e_score_correction_bias", ".e_score_correction.bias"), tensor
