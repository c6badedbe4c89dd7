"""SmolLM3: Llama, but some layers do not rotate q and k."""

from __future__ import annotations

from dataclasses import replace

from windlass.models.families.base import (
    Family,
    GGUFFamily,
    layer_windows,
    read_decoder,
    rotating_layers,
)
from windlass.models.fields import Fields
from windlass.models.hparams import HParams


def _smollm3(fields: Fields, architecture: str) -> HParams:
    fields = fields.with_defaults(
        {"rope_theta": 2000000.0, "tie_word_embeddings": True, "num_key_value_heads": 4}
    )
    bias = fields.flag("attention_bias", False)
    hparams = read_decoder(
        fields,
        architecture,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )
    rotates = rotating_layers(fields)
    ropes = tuple(hparams.rope if each else None for each in rotates)
    windows = _windows(fields, rotates) or hparams.sliding_windows
    return replace(hparams, layer_ropes=ropes, sliding_windows=windows)


def _windows(fields: Fields, rotates: list[bool]) -> tuple[int | None, ...] | None:
    if not fields.flag("use_sliding_window", False) or "sliding_window" not in fields:
        return None
    window = fields.positive_int("sliding_window")
    found = layer_windows(fields, window)
    return found or tuple(None if each else window for each in rotates)


# llama.cpp's files do not store which layers rotate: each fourth does not.
SMOLLM3 = Family(model_type="smollm3", read=_smollm3, gguf=GGUFFamily(permuted=True))
