"""Ministral: Mistral with windows in some layers. Ministral 3: with scores that grow with the position."""

from __future__ import annotations

from windlass.models.families.base import Family, layer_windows, read_decoder
from windlass.models.fields import Fields
from windlass.models.hparams import HParams


def _ministral(fields: Fields, architecture: str) -> HParams:
    window = fields.positive_int_or_none("sliding_window", 4096)
    layers = fields.positive_int("num_hidden_layers")
    windows = layer_windows(fields, window) or (window,) * layers
    return read_decoder(fields, architecture, windows=windows)


_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _ministral3(fields: Fields, architecture: str) -> HParams:
    fields = fields.with_defaults(
        {
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": _MINISTRAL3_ROPE,
            "sliding_window": None,
        }
    )
    return _ministral(fields, architecture)


MINISTRAL = Family(model_type="ministral", read=_ministral)
MINISTRAL3 = Family(model_type="ministral3", read=_ministral3)
