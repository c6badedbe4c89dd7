"""StarCoder2: LayerNorm, GELU without a gate, biases, a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from windlass.models.families.base import (
    Family,
    GGUFFamily,
    activation,
    layer_norm,
    read_decoder,
)
from windlass.models.fields import Fields
from windlass.models.gguf_header import GGUFHeader
from windlass.models.hparams import HParams
from windlass.models.tensor_rules import Rule, renames


def _starcoder2(fields: Fields, architecture: str) -> HParams:
    bias = fields.flag("use_bias", True)
    window = fields.positive_int("sliding_window") if "sliding_window" in fields else None
    layers = fields.positive_int("num_hidden_layers")
    return read_decoder(
        fields.with_defaults({"tie_word_embeddings": True}),
        architecture,
        norm=layer_norm(fields, "norm_epsilon"),
        windows=(window,) * layers,
        activation=activation(fields, default="gelu_pytorch_tanh"),
        gated_mlp=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


def _rules(hparams: HParams) -> Sequence[Rule]:
    del hparams
    mlp = "model.layers.*.mlp"
    return renames({f"{mlp}.c_fc": f"{mlp}.up_proj", f"{mlp}.c_proj": f"{mlp}.down_proj"})


def _gguf(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "use_bias": "blk.0.attn_q.bias" in header.tensors,
        "sliding_window": keys.count("attention.sliding_window", 0) or None,
    }


STARCODER2 = Family(
    model_type="starcoder2", read=_starcoder2, rules=_rules, gguf=GGUFFamily(config=_gguf)
)
