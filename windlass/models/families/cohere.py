"""Command R (attention and MLP in parallel, scaled logits) and Command R7B (windows; full layers do not rotate)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from windlass.models.families.base import (
    Family,
    GGUFFamily,
    gguf_windows,
    layer_norm,
    periodic_windows,
    read_decoder,
)
from windlass.models.fields import Fields
from windlass.models.gguf_header import GGUFHeader
from windlass.models.hparams import HParams


def _cohere(fields: Fields, architecture: str) -> HParams:
    bias = fields.flag("attention_bias", False)
    return read_decoder(
        fields.with_defaults({"rope_theta": 500000.0, "tie_word_embeddings": True}),
        architecture,
        norm=layer_norm(fields, bias=False, placement="parallel"),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="each_head" if fields.flag("use_qk_norm", False) else None,
        qk_norm_kind="layer",
        rope_interleaved=True,
        logit_scale=fields.number("logit_scale", 0.0625),
    )


def _cohere2(fields: Fields, architecture: str) -> HParams:
    hparams = _cohere(fields.with_defaults({"rope_theta": 10000.0}), architecture)
    windows = periodic_windows(fields, fields.positive_int_or_none("sliding_window", 4096))
    ropes = tuple(None if window is None else hparams.rope for window in windows)
    return replace(hparams, sliding_windows=windows, layer_ropes=ropes)


def _gguf(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    return {
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "logit_scale": keys.number("logit_scale"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors,
        **gguf_windows(keys),
    }


COHERE = Family(model_type="cohere", read=_cohere, gguf=GGUFFamily(config=_gguf))
COHERE2 = Family(model_type="cohere2", read=_cohere2, gguf=GGUFFamily(config=_gguf))
