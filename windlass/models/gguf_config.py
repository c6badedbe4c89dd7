"""Converts GGUF metadata to the form of a config.json, so that a family reads both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.errors import CheckpointError, UnsupportedError
from windlass.models.families.registry import family_of, gguf_architecture
from windlass.models.fields import Fields
from windlass.models.gguf_header import GGUFHeader

# Fields of config.json by the tensors that have their values.
ROPE_FACTORS = {
    "rope_freqs.weight": "rope_factors",
    "rope_factors_long.weight": "long_factor",
    "rope_factors_short.weight": "short_factor",
}
# Lists that are not one common value of all layers: the windows, which a family reads, and of M-RoPE.
_LISTS = ("attention.sliding_window_pattern", "rope.dimension_sections")
_KV_HEADS, _MLP_SIZE = "attention.head_count_kv", ".feed_forward_length"


def architecture_of(header: GGUFHeader) -> str:
    """llama.cpp's name of the architecture. Raises UnsupportedError for an unknown one."""
    name = header.metadata.get("general.architecture")
    if name is None:
        raise CheckpointError(
            f"{header.path}: has no general.architecture, so it is not a language model."
        )
    gguf_architecture(str(name), str(header.path))
    return str(name)


def hf_config(
    header: GGUFHeader, rope_factors: Mapping[str, list[float]] | None = None
) -> dict[str, Any]:
    """A config.json's dictionary. `rope_factors`: values of the tensors in ROPE_FACTORS."""
    architecture = architecture_of(header)
    name = gguf_architecture(architecture, str(header.path))
    keys = _keys(header, architecture)
    heads, kv_heads = head_counts(header)
    hidden = keys.positive_int("embedding_length")
    head_dim = keys.positive_int("attention.key_length", max(1, hidden // heads))
    value_dim = keys.positive_int("attention.value_length", head_dim)
    is_latent = "attention.kv_lora_rank" in keys
    if value_dim != head_dim and not is_latent:
        raise UnsupportedError(
            f"{header.path}: the head size of keys is {head_dim} and of values {value_dim}; "
            "different sizes are not supported."
        )
    # Of latent attention, only the features with positions count.
    rope_dim = keys.positive_int("rope.dimension_count") if is_latent else head_dim
    return {
        "architectures": [name],
        "hidden_size": hidden,
        "num_hidden_layers": keys.positive_int("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        **keys.renamed({"feed_forward_length": "intermediate_size"}),
        "vocab_size": _vocab_size(header),
        **keys.renamed({"attention.layer_norm_rms_epsilon": "rms_norm_eps"}),
        "hidden_act": "silu",
        "max_position_embeddings": keys.positive_int("context_length"),
        "rope_parameters": {**_rope(keys, rope_dim), **_factors(keys, rope_factors or {})},
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.metadata.get("tokenizer.ggml.eos_token_id"),
        **family_of(name).gguf.config(keys, header),
    }


def head_counts(header: GGUFHeader) -> tuple[int, int]:
    """The number of query heads and of KV heads."""
    keys = _keys(header, architecture_of(header))
    heads = keys.positive_int("attention.head_count")
    return heads, keys.positive_int(_KV_HEADS, heads)


def _keys(header: GGUFHeader, architecture: str) -> Fields:
    """The metadata fields under the architecture's prefix."""
    prefix = architecture + "."
    lists = family_of(gguf_architecture(architecture, str(header.path))).gguf.layer_lists
    values = {
        key.removeprefix(prefix): value
        if key.removeprefix(prefix) in _LISTS
        else max(value)
        if key.removeprefix(prefix) in lists and isinstance(value, list) and value
        else _common_value(key, value, header)
        for key, value in header.metadata.items()
        if key.startswith(prefix)
    }
    source = f"{header.path} (metadata {prefix}*)"
    return Fields(values, source, "Download the file again, or convert the model again.")


def _common_value(key: str, value: Any, header: GGUFHeader) -> Any:
    """The common value of all layers: some writers store one value per layer."""
    if not isinstance(value, list):
        return value
    if key.endswith((_KV_HEADS, _MLP_SIZE)):  # layers without attention or MLP have none
        value = [count for count in value if count] or [1]
    if len(set(value)) != 1:
        raise UnsupportedError(
            f"{header.path}: {key} differs between layers ({value}), which is not supported."
        )
    return value[0]


def _vocab_size(header: GGUFHeader) -> int:
    """The number of embedding rows, which may exceed the tokenizer's vocabulary (padding)."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(
            f"{header.path}: no tensor token_embd.weight among {len(header.tensors)} tensors; "
            "the file does not contain a complete network."
        )
    return embedding.shape[0]


def _rope(keys: Fields, head_dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "partial_rotary_factor": keys.positive_int("rope.dimension_count", head_dim) / head_dim,
    }
    kind = keys.text("rope.scaling.type", "none")
    old_factor = keys.number("rope.scale_linear", 1.0)  # older files without a scaling type
    if kind == "none" and old_factor != 1.0:
        return rope | {"rope_type": "linear", "factor": old_factor}
    if kind == "none":
        return rope | {"rope_type": "default"}
    scaling = {
        "factor": "factor",
        "original_context_length": "original_max_position_embeddings",
        "attn_factor": "attention_factor",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    found = keys.present(*(f"rope.scaling.{name}" for name in scaling))
    named = {scaling[key.removeprefix("rope.scaling.")]: value for key, value in found.items()}
    log_factor = keys.number_or_none("rope.scaling.yarn_log_multiplier")
    if log_factor:  # DeepSeek: a tenth of mscale_all_dim, which equals mscale
        named |= dict.fromkeys(("mscale", "mscale_all_dim"), 10 * log_factor)
    return rope | {"rope_type": kind} | named


def _factors(keys: Fields, found: Mapping[str, list[float]]) -> dict[str, Any]:
    """The RoPE fields that the factors imply; files with long and short factors name no RoPE type."""
    named: dict[str, Any] = {ROPE_FACTORS[name]: values for name, values in found.items()}
    if "long_factor" not in named:
        return named
    original = keys.positive_int(
        "rope.scaling.original_context_length", keys.positive_int("context_length")
    )
    return named | {
        "rope_type": "longrope",
        "attention_factor": keys.number("rope.scaling.attn_factor", 1.0),
        "original_max_position_embeddings": original,
    }
