"""Writes models of transformers as GGUF files, as llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.models.tiny import add_value

_PERMUTED = ("granite", "internlm2", "smollm3")  # as llama
_TRANSPOSED = ("c_attn", "c_fc", "c_proj")  # of GPT-2


def write_model(
    path: Path, architecture: str, model: torch.nn.Module, metadata: dict[str, Any]
) -> Path:
    """A GGUF in float32. `metadata`: keys of the architecture beside the common ones."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "n_inner", None) or config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": rope.get("rope_theta", 10000.0),
        **_epsilon(config),
        **metadata,
    }
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        add_value(writer, f"{architecture}.{key}", value)
    for key, value in TOKENIZER.items():
        add_value(writer, key, value)
    for name, tensor in _tensors(architecture, model).items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    for kind in ("long", "short"):
        if f"{kind}_factor" in rope:
            factors = np.array(rope[f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": [f"t{i}" for i in range(97)],
    "tokenizer.ggml.token_type": [1] * 97,
    "tokenizer.ggml.merges": ["t 1"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def _epsilon(config: Any) -> dict[str, float]:
    if hasattr(config, "rms_norm_eps"):
        return {"attention.layer_norm_rms_epsilon": config.rms_norm_eps}
    names = ("layer_norm_eps", "norm_eps", "layer_norm_epsilon", "norm_epsilon")
    found = [getattr(config, name) for name in names if hasattr(config, name)]
    return {"attention.layer_norm_epsilon": found[0]}


def _tensors(architecture: str, model: torch.nn.Module) -> dict[str, np.ndarray]:
    config = model.config
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    found: dict[str, np.ndarray] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name, parameter in model.named_parameters():
        values = _converted(architecture, name, parameter.detach(), config).numpy()
        if ".norms." in name:  # one tensor for each head
            name = name.partition(".norms.")[0] + ".weight"
            stacks.setdefault(name, []).append(values)
            values = np.stack(stacks[name])
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        found[target] = values
    return found


def _converted(architecture: str, name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    module = name.split(".")[-2]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    if architecture in _PERMUTED and module in heads:
        halves = tensor.unflatten(0, (heads[module], 2, -1))
        return halves.transpose(1, 2).flatten(0, 2)
    if architecture == "gpt2" and module in _TRANSPOSED and tensor.ndim == 2:
        return tensor.T
    if architecture == "gptneox" and module == "query_key_value":
        return (
            tensor.unflatten(0, (config.num_attention_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        )
    if architecture == "nemotron" and name.endswith("norm.weight"):
        return tensor + 1.0
    return tensor
