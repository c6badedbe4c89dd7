"""Bamba: Mamba-2 layers with some attention layers between them, whose RoPE rotates half of each head.

llama.cpp stores it as Granite 4 (`granitehybrid`).
"""

from __future__ import annotations

from windlass.models.families.base import Family, read_decoder
from windlass.models.families.hybrid import MAMBA_MLP_NAMES, mamba_rules, read_mamba
from windlass.models.fields import Fields
from windlass.models.hparams import HParams
from windlass.models.tensor_rules import Rule, renames


def _bamba(fields: Fields, architecture: str) -> HParams:
    fields = fields.with_defaults({"partial_rotary_factor": 0.5, "num_key_value_heads": 8})
    attention = fields.sequence("attn_layer_indices") or ()
    layers = tuple(
        layer not in attention for layer in range(fields.positive_int("num_hidden_layers"))
    )
    bias = fields.flag("attention_bias", False)
    return read_decoder(
        fields,
        architecture,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        recurrent=read_mamba(fields, layers) if any(layers) else None,
    )


def _rules(hparams: HParams) -> list[Rule]:
    return [*renames(MAMBA_MLP_NAMES), *mamba_rules(hparams)]


BAMBA = Family(model_type="bamba", read=_bamba, rules=_rules)
