"""Llama 2 and 3, SmolLM2, TinyLlama, Falcon 3 and others that use Llama's architecture; Mistral."""

from __future__ import annotations

from typing import Any

from windlass.errors import UnsupportedError
from windlass.models.families.base import Family, GGUFFamily, read_decoder
from windlass.models.families.moe import EXPERT_NAMES
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


def _gguf_variant(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    """A llama file with a sliding window is a Mistral model, and one with experts a Mixtral."""
    window = keys.count("attention.sliding_window", 0)
    found: dict[str, Any] = {"sliding_window": window} if window else {}
    if keys.count("expert_count", 0):
        if "blk.0.ffn_gate.0.weight" in header.tensors:
            raise UnsupportedError(
                f"{header.path}: has a tensor for each expert, as old versions of llama.cpp wrote "
                "them; only stacked experts are supported. Convert the model again."
            )
        names = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
        return found | keys.renamed(names) | {"architectures": ["MixtralForCausalLM"]}
    return found | {"architectures": ["MistralForCausalLM"]} if window else {}


_GGUF = GGUFFamily(names=EXPERT_NAMES, config=_gguf_variant, permuted=True)
LLAMA = Family(model_type="llama", read=_llama, gguf=_GGUF)
MISTRAL = Family(model_type="mistral", read=_mistral, gguf=_GGUF)
