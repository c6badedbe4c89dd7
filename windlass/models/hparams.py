"""The hyper-parameters of a network, independent of the file format.

Reads a config.json's dictionary; gguf_config.py converts GGUF metadata to that form, and
rope_config.py reads the RoPE fields.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from windlass.errors import CheckpointError, UnsupportedError
from windlass.models.fields import Fields
from windlass.models.rope_config import RopeConfig

__all__ = ["HParams", "RopeConfig"]


@dataclass(frozen=True, slots=True)
class _Family:
    """Properties of an architecture that its config.json does not contain."""

    model_type: str
    qkv_bias: bool | None = False  # None: from attention_bias, also for the output projection
    mlp_bias: bool | None = False  # None: from mlp_bias
    qk_norm: bool = False
    head_dim: int | None = None  # default if config.json has none; None: hidden_size / num_heads
    windows: Literal["none", "all", "by_layer"] = "none"


_FAMILIES = {
    "LlamaForCausalLM": _Family("llama", qkv_bias=None, mlp_bias=None),
    "MistralForCausalLM": _Family("mistral", windows="all"),
    "Qwen2ForCausalLM": _Family("qwen2", qkv_bias=True, windows="by_layer"),
    "Qwen3ForCausalLM": _Family(
        "qwen3", qkv_bias=None, qk_norm=True, head_dim=128, windows="by_layer"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HParams:
    """A network's hyper-parameters. Made by `HParams.from_hf`."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    activation: str
    rope: RopeConfig
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]  # per layer; None: full attention
    max_positions: int  # maximum context length, with RoPE scaling
    dtype: str | None  # of the checkpoint: "bfloat16"
    bos_id: int | None
    eos_ids: tuple[int, ...]
    quantization: Mapping[str, Any] = field(
        default_factory=dict
    )  # the raw quantization_config; quant/ reads it
    source: str = "config.json"  # the file, for error messages

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str = "config.json") -> HParams:
        """Read a config.json's dictionary. `source` is the file's name in error messages."""
        architecture = _architecture(config, source)
        family = _FAMILIES[architecture]
        fields = Fields(config, source)
        _check_activation(fields)
        heads = fields.positive_int("num_attention_heads")
        kv_heads = fields.positive_int("num_key_value_heads", heads)
        hidden = fields.positive_int("hidden_size")
        layers = fields.positive_int("num_hidden_layers")
        head_dim = fields.positive_int(
            "head_dim", family.head_dim or _head_dim(hidden, heads, fields)
        )
        if heads % kv_heads:
            raise CheckpointError(
                f"{source}: num_attention_heads ({heads}) is not a multiple of "
                f"num_key_value_heads ({kv_heads})."
            )
        attention_bias = fields.flag("attention_bias", False)
        rope = RopeConfig.from_hf(fields, head_dim)
        return cls(
            architecture=architecture,
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=fields.positive_int("intermediate_size"),
            vocab_size=fields.positive_int("vocab_size"),
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            activation="silu",
            rope=rope,
            tie_embeddings=fields.flag("tie_word_embeddings", False),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias if family.qkv_bias is None else False,
            mlp_bias=fields.flag("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias,
            qk_norm=family.qk_norm,
            sliding_windows=_windows(family, fields, layers),
            max_positions=rope.max_context(fields.positive_int("max_position_embeddings")),
            dtype=fields.text("dtype", None) or fields.text("torch_dtype", None),
            bos_id=next(iter(fields.token_ids("bos_token_id")), None),
            eos_ids=fields.token_ids("eos_token_id"),
            quantization=fields.mapping("quantization_config")
            or fields.mapping("compression_config"),
            source=source,
        )


def _architecture(config: Mapping[str, Any], source: str) -> str:
    """The architecture's name, from `architectures`, else from `model_type`."""
    listed = config.get("architectures")
    by_type = {family.model_type: name for name, family in _FAMILIES.items()}
    if isinstance(listed, (list, tuple)) and listed:
        name = str(listed[0])
    elif "model_type" in config:
        name = by_type.get(config["model_type"], str(config["model_type"]))
    else:
        raise CheckpointError(
            f"{source}: has neither architectures nor model_type, so the architecture is unknown. "
            f'Add one, such as --hf-overrides \'{{"architectures": ["LlamaForCausalLM"]}}\'.'
        )
    if name not in _FAMILIES:
        near = difflib.get_close_matches(name, list(_FAMILIES), n=1, cutoff=0.4)
        hint = f" The closest name is {near[0]}." if near else ""
        raise UnsupportedError(
            f"{source}: architecture {name!r} is not supported. Supported: {', '.join(_FAMILIES)}.{hint}"
        )
    return name


def _check_activation(fields: Fields) -> None:
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedError(
            f"{fields.source}: hidden_act {activation!r} is not supported; only 'silu' is."
        )


def _head_dim(hidden: int, heads: int, fields: Fields) -> int:
    if hidden % heads and "head_dim" not in fields:
        raise CheckpointError(
            f"{fields.source}: hidden_size ({hidden}) is not a multiple of num_attention_heads "
            f"({heads}), and head_dim is not set."
        )
    return hidden // heads


def _windows(family: _Family, fields: Fields, layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer; None: full attention."""
    if family.windows == "none":
        return (None,) * layers
    window = fields.positive_int_or_none("sliding_window", 4096)
    if family.windows == "all":
        return (window,) * layers
    if window is None or not fields.flag("use_sliding_window", False):
        return (None,) * layers
    kinds = fields.sequence("layer_types")
    if kinds is None:
        first = fields.count("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(layers))
    if len(kinds) != layers:
        raise CheckpointError(
            f"{fields.source}: layer_types has {len(kinds)} layers, num_hidden_layers is {layers}."
        )
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown:
        raise UnsupportedError(
            f"{fields.source}: layer_types contains {', '.join(sorted(map(str, unknown)))}; "
            "only sliding_attention and full_attention are supported."
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
