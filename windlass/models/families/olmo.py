"""OLMo 2: norms of the sublayers' outputs, and of all q and k heads together. OLMo 3 adds windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
from windlass.models.rope_config import RopeConfig


def _olmo2(fields: Fields, architecture: str) -> HParams:
    bias = fields.flag("attention_bias", False)
    return read_decoder(
        fields,
        architecture,
        norm=NormHParams(eps=fields.number("rms_norm_eps", 1e-5), placement="post"),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="whole",
    )


def _olmo3(fields: Fields, architecture: str) -> HParams:
    fields = fields.with_defaults({"rope_theta": 500000.0})
    windows = periodic_windows(fields, fields.positive_int_or_none("sliding_window", 4096))
    full, sliding = _ropes(fields)
    hparams = _olmo2(full, architecture)
    local = RopeConfig.from_hf(sliding, hparams.head_dim)
    ropes = tuple(hparams.rope if window is None else local for window in windows)
    return replace(hparams, sliding_windows=windows, layer_ropes=ropes)


def _ropes(fields: Fields) -> tuple[Fields, Fields]:
    """The config as layers with full attention read it, and as those with a window do.

    Without parameters for each kind of layer, scaling applies to full attention only.
    """
    found = fields.mapping("rope_parameters")
    if "full_attention" in found or "sliding_attention" in found:
        kinds = (found.get(f"{kind}_attention") for kind in ("full", "sliding"))
        full, sliding = (fields.updated(rope_parameters=kind or {}) for kind in kinds)
        return full, sliding
    theta = found.get("rope_theta")
    unscaled = {"rope_theta": theta} if theta else {}
    return fields, fields.updated(rope_parameters=unscaled, rope_scaling=None)


def _gguf(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    """An olmo2 file with a sliding window is an OLMo 3 model."""
    del header
    windows = gguf_windows(keys)
    return {"architectures": ["Olmo3ForCausalLM"], **windows} if windows else {}


_FILES = GGUFFamily(
    names={
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    config=_gguf,
)
OLMO2 = Family(model_type="olmo2", read=_olmo2, gguf=_FILES)
OLMO3 = Family(model_type="olmo3", read=_olmo3, gguf=_FILES)
