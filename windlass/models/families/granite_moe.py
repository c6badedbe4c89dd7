"""Granite 3 MoE: mixtures of experts in every layer, and multipliers as in the dense Granite 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from windlass.models.families.base import Family, GGUFFamily
from windlass.models.families.granite import gguf_multipliers, read_granite
from windlass.models.families.moe import (
    EXPERT_NAMES,
    gguf_expert_rules,
    read_routing,
    stacked_expert_rules,
)
from windlass.models.fields import Fields
from windlass.models.gguf_header import GGUFHeader
from windlass.models.hparams import HParams, MoEHParams
from windlass.models.tensor_rules import Rule


def _granite_moe(fields: Fields, architecture: str) -> HParams:
    moe = MoEHParams(
        routing=read_routing(fields, normalised=True),
        intermediate_size=fields.positive_int("intermediate_size"),
        layers=(True,) * fields.positive_int("num_hidden_layers"),
    )
    return read_granite(fields, architecture, moe=moe)


def granite_expert_rules(hparams: HParams) -> Sequence[Rule]:
    """Rules for the stacked experts of safetensors, as transformers 4 and 5 name them."""
    assert hparams.moe is not None
    count, inner = hparams.moe.routing.num_experts, hparams.moe.intermediate_size
    layer, name = r"(.*)\.block_sparse_moe", r"\1.mlp.experts.{expert}"
    both = rf"{layer}\.(?:input_linear\.weight|experts\.gate_up_proj)"
    down = rf"{layer}\.(?:output_linear\.weight|experts\.down_proj)"
    return [
        Rule(pattern=rf"{layer}\.router\.(?:layer\.)?weight", name=r"\1.mlp.gate.weight"),
        *stacked_expert_rules(both, f"{name}.gate_proj.weight", count, 2 * inner, (0, inner)),
        *stacked_expert_rules(both, f"{name}.up_proj.weight", count, 2 * inner, (inner, 2 * inner)),
        *stacked_expert_rules(down, f"{name}.down_proj.weight", count, hparams.hidden_size),
    ]


def _gguf_config(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    del header
    names = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
    return {**gguf_multipliers(keys), **keys.renamed(names)}


GRANITE_MOE = Family(
    model_type="granitemoe",
    read=_granite_moe,
    rules=granite_expert_rules,
    gguf=GGUFFamily(
        names=EXPERT_NAMES, config=_gguf_config, rules=gguf_expert_rules, permuted=True
    ),
)
