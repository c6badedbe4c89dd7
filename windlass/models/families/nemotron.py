"""Nemotron 3 and 4, Minitron: LayerNorm with weights stored less 1, squared ReLU without a gate."""

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
from windlass.models.tensor_rules import Rule


def _nemotron(fields: Fields, architecture: str) -> HParams:
    bias = fields.flag("attention_bias", False)
    return read_decoder(
        fields.with_defaults({"partial_rotary_factor": 0.5}),
        architecture,
        norm=layer_norm(fields, "norm_eps"),
        activation=activation(fields, default="relu2"),
        gated_mlp=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _rules(hparams: HParams) -> Sequence[Rule]:
    del hparams
    return [Rule(pattern=r"(.*norm\.weight)", name=r"\1", add=1.0)]


def _gguf(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    """llama.cpp's files have the 1 added."""
    return {
        "hidden_act": "relu2",
        "norm_eps": keys.number("attention.layer_norm_epsilon"),
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
    }


NEMOTRON = Family(
    model_type="nemotron", read=_nemotron, rules=_rules, gguf=GGUFFamily(config=_gguf)
)
