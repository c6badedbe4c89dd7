"""Llama 2 and 3, SmolLM2, TinyLlama, Falcon 3 and others that use Llama's architecture; Mistral."""

from __future__ import annotations

from typing import Any

from windlass.errors import UnsupportedError
from windlass.models.families.base import Family, GGUFFamily, read_decoder
from windlass.models.fields import Fields
from windlass.models.gguf_header import GGUFHeader
from windlass.models.hparams import HParams


def _llama(fields: Fields, architecture: str) -> HParams:
    bias = fields.flag("attention_bias", False)
    return read_decoder(
        fields,
        architecture,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _mistral(fields: Fields, architecture: str) -> HParams:
    window = fields.positive_int_or_none("sliding_window", 4096)
    layers = fields.positive_int("num_hidden_layers")
    return read_decoder(fields, architecture, windows=(window,) * layers)


def _gguf_window(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    """A llama file with a sliding window is a Mistral model."""
    if keys.count("expert_count", 0):
        raise UnsupportedError(
            f"{header.path}: mixture-of-experts files of llama are not supported."
        )
    window = keys.count("attention.sliding_window", 0)
    if not window:
        return {}
    return {"architectures": ["MistralForCausalLM"], "sliding_window": window}


_GGUF = GGUFFamily(config=_gguf_window, permuted=True)
LLAMA = Family(model_type="llama", read=_llama, gguf=_GGUF)
MISTRAL = Family(model_type="mistral", read=_mistral, gguf=_GGUF)
