"""Granite 4: Mamba-2 layers with some attention layers between them, or attention alone.

Every layer has a dense MLP, or a mixture of experts and a shared expert. Most models have no RoPE: the
Mamba-2 layers know the order of tokens. Multipliers are those of Granite 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from windlass.errors import UnsupportedError
from windlass.models.families.base import Family, GGUFFamily, fused_gate_up
from windlass.models.families.granite import gguf_multipliers, read_granite
from windlass.models.families.granite_moe import granite_expert_rules
from windlass.models.families.hybrid import (
    GGUF_MAMBA_NAMES,
    gguf_mamba,
    gguf_mamba_rules,
    listed_layers,
    mamba_rules,
    read_mamba,
)
from windlass.models.families.moe import (
    EXPERT_NAMES,
    SHARED_NAMES,
    gguf_expert_rules,
    read_routing,
)
from windlass.models.fields import Fields
from windlass.models.gguf_header import GGUFHeader
from windlass.models.hparams import HParams, MoEHParams
from windlass.models.tensor_rules import Rule, renames

_MAMBA = ("mamba", "linear_attention")
_ATTENTION = ("attention", "full_attention")


def _granite4(fields: Fields, architecture: str) -> HParams:
    layers = fields.positive_int("num_hidden_layers")
    kinds = _layer_kinds(fields, layers)
    shared = fields.positive_int("shared_intermediate_size", 1024)
    moe = None
    if fields.count("num_local_experts", 8):
        moe = MoEHParams(
            routing=read_routing(
                fields.with_defaults({"num_local_experts": 8, "num_experts_per_tok": 2}),
                normalised=True,
            ),
            intermediate_size=fields.positive_int("intermediate_size"),
            layers=(True,) * layers,
            shared_intermediate_size=shared,
        )
    has_rope = _has_rope(fields)
    return read_granite(
        fields.updated(intermediate_size=shared),
        architecture,
        moe=moe,
        recurrent=read_mamba(fields, kinds) if any(kinds) else None,
        layer_ropes=() if has_rope else (None,) * layers,
    )


def _layer_kinds(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Whether each layer is Mamba-2."""
    name = "layer_types" if "layer_types" in fields else "layers_block_type"
    return listed_layers(fields, _MAMBA, _ATTENTION, name) or (True,) * layers


def _has_rope(fields: Fields) -> bool:
    position = fields.text("position_embedding_type", None)
    if position not in (None, "rope", "nope"):
        raise UnsupportedError(
            f"{fields.source}: position_embedding_type {position!r} is not supported; it is rope, or "
            "nope or null for none."
        )
    return position == "rope"


def _rules(hparams: HParams) -> Sequence[Rule]:
    shared = "model.layers.*.shared_mlp"
    mlp = "model.layers.*.mlp"
    experts: Sequence[Rule] = ()
    if hparams.moe is not None:
        mlp, experts = f"{mlp}.shared_expert", granite_expert_rules(hparams)
    return [
        *fused_gate_up(hparams, f"{shared}.input_linear", mlp),
        *renames({f"{shared}.output_linear": f"{mlp}.down_proj"}),
        *experts,
        *mamba_rules(hparams),
    ]


def _gguf_rules(hparams: HParams) -> list[Rule]:
    return [
        *(gguf_expert_rules(hparams) if hparams.moe is not None else ()),
        *gguf_mamba_rules(hparams),
    ]


def _gguf_config(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    layers = keys.positive_int("block_count")
    # One number per layer; a layer without KV heads is recurrent.
    kv_heads = header.metadata.get("granitehybrid.attention.head_count_kv")
    each = kv_heads if isinstance(kv_heads, list) else [1] * layers
    config = {
        **gguf_multipliers(keys),
        "layer_types": ["attention" if count else "mamba" for count in each],
        "position_embedding_type": "rope" if keys.flag("rope.scaling.finetuned", True) else None,
        "attention_bias": any(name.endswith(".attn_q.bias") for name in header.tensors),
        "num_local_experts": keys.count("expert_count", 0),
        "num_experts_per_tok": keys.count("expert_used_count", 0),
        "shared_intermediate_size": keys.count("expert_shared_feed_forward_length", 0)
        or keys.positive_int("feed_forward_length"),
    }
    if all(each):
        return config
    groups = keys.positive_int("ssm.group_count", 1)
    if groups != 1:
        raise UnsupportedError(
            f"{header.path}: granitehybrid.ssm.group_count is {groups}: llama.cpp normalises each group, "
            "and transformers all together. Only one group is supported in GGUF files."
        )
    return config | gguf_mamba(keys, header)


_GGUF_NAMES = {
    **EXPERT_NAMES,
    **SHARED_NAMES,
    **GGUF_MAMBA_NAMES,
}
GRANITE4 = Family(
    model_type="granitemoehybrid",
    read=_granite4,
    rules=_rules,
    gguf=GGUFFamily(names=_GGUF_NAMES, config=_gguf_config, rules=_gguf_rules, permuted=True),
)
