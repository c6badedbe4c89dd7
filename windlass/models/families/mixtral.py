"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Sequence

from windlass.models.families.base import Family, GGUFFamily, read_decoder
from windlass.models.families.moe import gguf_expert_rules, read_routing
from windlass.models.fields import Fields
from windlass.models.hparams import HParams, MoEHParams
from windlass.models.tensor_rules import Rule


def _mixtral(fields: Fields, architecture: str) -> HParams:
    layers = fields.positive_int("num_hidden_layers")
    window = fields.positive_int("sliding_window") if "sliding_window" in fields else None
    moe = MoEHParams(
        routing=read_routing(fields, normalised=True),
        intermediate_size=fields.positive_int("intermediate_size"),
        layers=(True,) * layers,
    )
    return read_decoder(fields, architecture, windows=(window,) * layers, moe=moe)


def block_sparse_rules(hparams: HParams) -> Sequence[Rule]:
    """Rules for experts and routers as Mixtral names them."""
    del hparams
    parts = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    experts = [
        Rule(
            pattern=rf"(.*)\.block_sparse_moe\.experts\.(\d+)\.{name}\.(\w+)",
            name=rf"\1.mlp.experts.\2.{part}.\3",
        )
        for name, part in parts.items()
    ]
    return [Rule(pattern=r"(.*)\.block_sparse_moe\.gate\.(\w+)", name=r"\1.mlp.gate.\2"), *experts]


# llama.cpp stores Mixtral as llama with experts; families/llama.py has the names.
MIXTRAL = Family(
    model_type="mixtral",
    read=_mixtral,
    rules=block_sparse_rules,
    gguf=GGUFFamily(rules=gguf_expert_rules),
)
