"""EXAONE 4: norms of the sublayers' outputs and of each head; with windows, full layers do not rotate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from windlass.errors import UnsupportedError
from windlass.models.families.base import (
    Family,
    GGUFFamily,
    gguf_windows,
    periodic_windows,
    read_decoder,
)
from windlass.models.fields import Fields
from windlass.models.gguf_header import GGUFHeader
from windlass.models.hparams import HParams, NormHParams


def _exaone4(fields: Fields, architecture: str) -> HParams:
    hparams = read_decoder(
        fields,
        architecture,
        norm=NormHParams(eps=fields.number("rms_norm_eps", 1e-5), placement="post"),
        qk_norm="head",
    )
    window = fields.positive_int_or_none("sliding_window", 4096)
    if window is None:
        return hparams
    pattern = fields.present("sliding_window_pattern").get("sliding_window_pattern", 4)
    if isinstance(pattern, str) and "layer_types" not in fields:
        raise UnsupportedError(
            f"{fields.source}: sliding_window_pattern is {pattern!r}; a number is supported, or "
            "layer_types."
        )
    windows = periodic_windows(fields, window)
    ropes = tuple(None if each is None else hparams.rope for each in windows)
    return replace(hparams, sliding_windows=windows, layer_ropes=ropes)


def _gguf(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    del header
    return {"sliding_window": None, **gguf_windows(keys)}


EXAONE4 = Family(
    model_type="exaone4",
    read=_exaone4,
    gguf=GGUFFamily(
        names={
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        config=_gguf,
    ),
)
