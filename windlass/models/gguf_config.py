"""GGUF metadata brought into the form of a config.json, so that one reader serves both.

Architectures: llama (Mistral files call themselves so too), qwen2, qwen3.
"""

from __future__ import annotations

from typing import Any

from windlass.errors import CheckpointError, UnsupportedError
from windlass.models.gguf_header import GGUFHeader

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def architecture_of(header: GGUFHeader) -> str:
    """llama.cpp's own name of the architecture; refuses the ones that are not known."""
    name = header.metadata.get("general.architecture")
    if name is None:
        raise CheckpointError(
            f"{header.path}: has no general.architecture, so it is no language model's file."
        )
    if name not in _ARCHITECTURES:
        raise UnsupportedError(
            f"{header.path}: GGUF architecture {name!r} is not known. "
            f"Known: {', '.join(_ARCHITECTURES)}."
        )
    return str(name)


def hf_config(header: GGUFHeader, rope_factors: list[float] | None) -> dict[str, Any]:
    """A config.json's dictionary. `rope_factors`: the values of rope_freqs.weight, when there."""
    keys = _Keys(header)
    heads = keys.required("attention.head_count")
    hidden = keys.required("embedding_length")
    head_dim = keys.optional("attention.key_length") or hidden // heads
    value_dim = keys.optional("attention.value_length") or head_dim
    if keys.optional("expert_count"):
        raise UnsupportedError(f"{header.path}: mixtures of experts are not known to this version.")
    if value_dim != head_dim:
        raise UnsupportedError(
            f"{header.path}: keys have {head_dim} features and values {value_dim}; "
            "this version needs them equal."
        )
    return {
        "architectures": [_ARCHITECTURES[keys.architecture]],
        "hidden_size": hidden,
        "num_hidden_layers": keys.required("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.optional("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "intermediate_size": keys.required("feed_forward_length"),
        "vocab_size": _vocab_size(header),
        "rms_norm_eps": keys.required("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "max_position_embeddings": keys.required("context_length"),
        "rope_parameters": _rope(keys, head_dim, rope_factors),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.metadata.get("tokenizer.ggml.eos_token_id"),
        **_window(keys),
    }


class _Keys:
    """Metadata under the architecture's prefix."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        self.architecture = architecture_of(header)

    def optional(self, name: str) -> Any:
        key = f"{self.architecture}.{name}"
        value = self.header.metadata.get(key)
        if not isinstance(value, list):
            return value
        # Some writers give one number per layer. All alike is the same as one.
        if len(set(value)) != 1:
            raise UnsupportedError(
                f"{self.header.path}: {key} differs from layer to layer ({value}), "
                "which this version does not know."
            )
        return value[0]

    def required(self, name: str) -> Any:
        value = self.optional(name)
        if value is None:
            raise CheckpointError(
                f"{self.header.path}: metadata {self.architecture}.{name} is missing."
            )
        return value


def _vocab_size(header: GGUFHeader) -> int:
    """Rows of the embedding: it may be padded beyond the tokenizer's tokens."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(
            f"{header.path}: there is no tensor token_embd.weight among {len(header.tensors)}; "
            "the file holds no whole network."
        )
    return embedding.shape[0]


def _rope(keys: _Keys, head_dim: int, factors: list[float] | None) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_theta": keys.optional("rope.freq_base") or 10000.0,
        "partial_rotary_factor": (keys.optional("rope.dimension_count") or head_dim) / head_dim,
        "rope_factors": factors,
    }
    kind = keys.optional("rope.scaling.type") or "none"
    old_factor = keys.optional("rope.scale_linear")  # before scaling had a type
    if kind == "none" and old_factor and old_factor != 1.0:
        return rope | {"rope_type": "linear", "factor": old_factor}
    if kind == "none":
        return rope | {"rope_type": "default"}
    return rope | {
        "rope_type": kind,
        "factor": keys.optional("rope.scaling.factor"),
        "original_max_position_embeddings": keys.optional("rope.scaling.original_context_length"),
        "attention_factor": keys.optional("rope.scaling.attn_factor"),
        "beta_fast": keys.optional("rope.scaling.yarn_beta_fast"),
        "beta_slow": keys.optional("rope.scaling.yarn_beta_slow"),
    }


def _window(keys: _Keys) -> dict[str, Any]:
    """A llama file with a sliding window is a Mistral; of the others no writer says which layers."""
    window = keys.optional("attention.sliding_window")
    if not window:
        return {}
    if keys.architecture != "llama":
        raise UnsupportedError(
            f"{keys.header.path}: {keys.architecture} with a sliding window of {window} is not known."
        )
    return {"architectures": ["MistralForCausalLM"], "sliding_window": window}
