"""Falcon-H1: attention and Mamba-2 side by side in every layer, whose outputs are added.

Both read the same normalised input. Its multipliers of projections become part of the weights when they are
read, as llama.cpp's converter stores them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from windlass.errors import CheckpointError, UnsupportedError
from windlass.models.families.base import Family, GGUFFamily, read_decoder
from windlass.models.families.hybrid import (
    GGUF_MAMBA_NAMES,
    MAMBA_MLP_NAMES,
    gguf_mamba,
    gguf_mamba_rules,
    mamba_rules,
    read_mamba,
)
from windlass.models.fields import Fields
from windlass.models.gguf_header import GGUFHeader
from windlass.models.hparams import HParams
from windlass.models.tensor_rules import Rule, renames

_ONE = 1.0
_LAYER = r"model\.layers\.\d+"


def _falcon_h1(fields: Fields, architecture: str) -> HParams:
    bias, count = fields.flag("attention_bias", False), fields.positive_int("num_hidden_layers")
    if "mamba_d_ssm" not in fields and "mamba_expand" not in fields:
        fields = fields.with_defaults({"mamba_d_ssm": 1024})
    recurrent = read_mamba(
        fields, (True,) * count, beside_attention=True, norm_groups=_norm_groups(fields)
    )
    if fields.flag("projectors_bias", False) != recurrent.proj_bias:
        raise UnsupportedError(
            f"{fields.source}: projectors_bias and mamba_proj_bias differ, which is not supported."
        )
    multipliers = _multipliers(fields)
    if fields.mapping("quantization_config") and any(
        factor != _ONE for factor in multipliers.values()
    ):
        raise UnsupportedError(
            f"{fields.source}: a quantization_config is not supported with multipliers other than 1, "
            "which become part of the weights. Use the 16-bit model with --quantization, or a GGUF file."
        )
    return read_decoder(
        fields,
        architecture,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        embedding_scale=fields.number("embedding_multiplier", _ONE),
        logit_scale=fields.number("lm_head_multiplier", _ONE),
        recurrent=replace(
            recurrent,
            multipliers=None
            if fields.flag("multipliers_in_weights", False)  # of GGUF files
            else tuple(multipliers.items()),
        ),
    )


def _norm_groups(fields: Fields) -> int:
    """The groups of the norm after the scan; 0: there is none."""
    if not fields.flag("mamba_rms_norm", False):
        return 0
    if fields.flag("mamba_norm_before_gate", True):
        raise UnsupportedError(
            f"{fields.source}: mamba_norm_before_gate is true; only norms after the gate are supported."
        )
    return fields.positive_int("mamba_n_groups", 1)


def _multipliers(fields: Fields) -> dict[str, float]:
    """What the network's tensors are multiplied with, by the ends of their names."""
    number = partial(fields.number, default=_ONE)
    attention, mamba = number("attention_in_multiplier"), number("ssm_in_multiplier")
    key, out = number("key_multiplier"), number("attention_out_multiplier")
    gate, down = _numbers(fields, "mlp_multipliers", 2)
    found = {
        "self_attn.q_proj.weight": attention,
        "self_attn.v_proj.weight": attention,
        "self_attn.k_proj.weight": attention * key,
        "self_attn.k_proj.bias": key,
        **dict.fromkeys(("self_attn.o_proj.weight", "self_attn.o_proj.bias"), out),
        **dict.fromkeys(("mlp.gate_proj.weight", "mlp.gate_proj.bias"), gate),
        **dict.fromkeys(("mlp.down_proj.weight", "mlp.down_proj.bias"), down),
    }
    parts = zip(("gate", "x", "b", "c", "dt"), _numbers(fields, "ssm_multipliers", 5), strict=True)
    for part, factor in parts:
        found[f"mamba.{part}_proj.weight"] = mamba * factor
        found[f"mamba.{part}_proj.bias"] = factor
    last = number("ssm_out_multiplier")
    return found | dict.fromkeys(("mamba.out_proj.weight", "mamba.out_proj.bias"), last)


def _numbers(fields: Fields, name: str, count: int) -> list[float]:
    found = fields.sequence(name)
    if found is None:
        return [_ONE] * count
    if len(found) != count:
        raise CheckpointError(
            f"{fields.source}: {name} has {len(found)} numbers, expected {count}."
        )
    named = Fields({f"{name}[{i}]": each for i, each in enumerate(found)}, fields.source)
    return [named.number(f"{name}[{i}]") for i in range(count)]


def _outer_rules(hparams: HParams) -> list[Rule]:
    return [*renames(MAMBA_MLP_NAMES), *mamba_rules(hparams)]


def _rules(hparams: HParams) -> list[Rule]:
    """Rules that multiply the tensors, under the network's names."""
    assert hparams.recurrent is not None
    multipliers: Mapping[str, float] = dict(hparams.recurrent.multipliers or ())
    return [
        Rule(pattern=rf"({_LAYER}\.{re.escape(name)})", name=r"\1", scale=factor)
        for name, factor in multipliers.items()
        if factor != _ONE
    ]


def _gguf_config(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    mamba = gguf_mamba(keys, header)
    return {
        **mamba,
        "multipliers_in_weights": True,
        "projectors_bias": mamba["mamba_proj_bias"],
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in header.tensors,
        "mamba_norm_before_gate": False,
    }


def _gguf_rules(hparams: HParams) -> list[Rule]:
    """Norms before MLPs have no suffix in the file."""
    norm = Rule(pattern=rf"({_LAYER}\.post_attention_layernorm)", name=r"\1.weight")
    return [norm, *gguf_mamba_rules(hparams)]


FALCON_H1 = Family(
    model_type="falcon_h1",
    read=_falcon_h1,
    outer_rules=_outer_rules,
    rules=_rules,
    gguf=GGUFFamily(names=GGUF_MAMBA_NAMES, config=_gguf_config, rules=_gguf_rules),
)
