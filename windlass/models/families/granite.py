"""Granite 3: Llama with multipliers of embeddings, residuals, scores and logits."""

from __future__ import annotations

from typing import Any

from windlass.errors import UnsupportedError
from windlass.models.families.base import Family, GGUFFamily, read_decoder
from windlass.models.fields import Fields
from windlass.models.gguf_header import GGUFHeader
from windlass.models.hparams import HParams


def _granite(fields: Fields, architecture: str) -> HParams:
    return read_granite(fields, architecture, mlp_bias=fields.flag("mlp_bias", False))


def read_granite(fields: Fields, architecture: str, **known: Any) -> HParams:
    """Read what all generations share. `known` has fields of HParams that a generation adds."""
    bias = fields.flag("attention_bias", False)
    return read_decoder(
        fields,
        architecture,
        qkv_bias=bias,
        o_bias=bias,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        attention_scale=fields.number("attention_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
        **known,
    )


def _gguf(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    if not keys.flag("rope.scaling.finetuned", True):
        raise UnsupportedError(
            f"{header.path}: granite.rope.scaling.finetuned is false, for a model without RoPE; only "
            "models with RoPE are supported."
        )
    return gguf_multipliers(keys)


def gguf_multipliers(keys: Fields) -> dict[str, Any]:
    """Fields of config.json for the multipliers of a GGUF file."""
    dim = keys.positive_int("embedding_length") // keys.positive_int("attention.head_count")
    names = {
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
    scale = keys.number("attention.scale", dim**-0.5)
    return {"attention_multiplier": scale, **keys.renamed(names)}


GRANITE = Family(model_type="granite", read=_granite, gguf=GGUFFamily(config=_gguf, permuted=True))
