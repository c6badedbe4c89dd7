"""Granite 4: Mamba-2 layers with some attention layers between them, or attention alone.

Every layer has a dense MLP, or a mixture of experts and a shared expert. Most models have no RoPE: the
Mamba-2 layers know the order of tokens. Multipliers are those of Granite 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from windlass.core.recurrent import RecurrentHeads
from windlass.errors import CheckpointError, UnsupportedError
from windlass.models.families.base import Family, GGUFFamily, fused_gate_up
from windlass.models.families.granite import gguf_multipliers, read_granite
from windlass.models.families.granite_moe import granite_expert_rules
from windlass.models.families.hybrid import listed_layers
from windlass.models.families.moe import (
    EXPERT_NAMES,
    SHARED_NAMES,
    gguf_expert_rules,
    read_routing,
)
from windlass.models.fields import Fields
from windlass.models.gguf_header import GGUFHeader
from windlass.models.hparams import HParams, MoEHParams, RecurrentHParams
from windlass.models.tensor_rules import Rule, renames, split

_MAMBA = ("mamba", "linear_attention")
_ATTENTION = ("attention", "full_attention")
_MIXER = "model.layers.*.mamba"
# As Python and as transformers write infinity to JSON.
_NO_LIMITS = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])


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
        recurrent=_mamba(fields, kinds) if any(kinds) else None,
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


def _mamba(fields: Fields, kinds: tuple[bool, ...]) -> RecurrentHParams:
    count, groups = (
        fields.positive_int(f"mamba_n_{name}", default)
        for name, default in (("heads", 128), ("groups", 1))
    )
    inner = fields.number("mamba_expand", 2.0) * fields.positive_int("hidden_size")
    dim = inner / count
    if fields.present("mamba_d_head").get("mamba_d_head", "auto") != "auto":
        dim = fields.positive_int("mamba_d_head")
    if dim * count != inner or dim != int(dim):
        raise CheckpointError(
            f"{fields.source}: mamba_n_heads ({count}) times mamba_d_head ({dim:g}) is not "
            f"mamba_expand times hidden_size ({inner:g})."
        )
    if count % groups:
        raise CheckpointError(
            f"{fields.source}: mamba_n_heads ({count}) is not a multiple of mamba_n_groups ({groups})."
        )
    limit = list(fields.sequence("time_step_limit") or _NO_LIMITS[0])
    if limit not in _NO_LIMITS:
        raise UnsupportedError(
            f"{fields.source}: time_step_limit {limit} is not supported, only [0, Infinity]."
        )
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedError(
            f"{fields.source}: hidden_act {fields.text('hidden_act', 'silu')!r} is not supported with "
            "Mamba layers, only silu."
        )
    return RecurrentHParams(
        kind="mamba",
        heads=RecurrentHeads(
            num_heads=count,
            dim=int(dim),
            num_groups=groups,
            state_size=fields.positive_int("mamba_d_state", 256),
            conv_size=fields.positive_int("mamba_d_conv", 4),
        ),
        layers=kinds,
        conv_bias=fields.flag("mamba_conv_bias", True),
        proj_bias=fields.flag("mamba_proj_bias", False),
    )


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
        *_mixer_rules(hparams),
        Rule(pattern=r"(.*\.mamba)\.A_log", name=r"\1.A", log=True),
    ]


def _mixer_rules(hparams: HParams) -> list[Rule]:
    """Rules for the projections and convolutions that are stored together."""
    if hparams.recurrent is None:
        return []
    heads = hparams.recurrent.heads
    inner, shared = heads.inner, heads.group_features
    conv = {"x": inner, "b": shared, "c": shared}
    projections = {"gate": inner, **conv, "dt": heads.num_heads}
    return [
        *split(f"{_MIXER}.in_proj", {f"{_MIXER}.{k}_proj": n for k, n in projections.items()}),
        *split(f"{_MIXER}.conv1d", {f"{_MIXER}.{k}_conv": n for k, n in conv.items()}),
    ]


def _gguf_rules(hparams: HParams) -> list[Rule]:
    return [
        *(gguf_expert_rules(hparams) if hparams.moe is not None else ()),
        *_mixer_rules(hparams),
        Rule(pattern=r"(.*\.mamba)\.dt\.bias", name=r"\1.dt_bias"),
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
    heads, inner = keys.positive_int("ssm.time_step_rank"), keys.positive_int("ssm.inner_size")
    groups = keys.positive_int("ssm.group_count", 1)
    if groups != 1:
        raise UnsupportedError(
            f"{header.path}: granitehybrid.ssm.group_count is {groups}: llama.cpp normalises each group, "
            "and transformers all together. Only one group is supported in GGUF files."
        )
    return config | {
        "mamba_n_heads": heads,
        "mamba_n_groups": groups,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner / keys.positive_int("embedding_length"),
        "mamba_d_state": keys.positive_int("ssm.state_size"),
        "mamba_d_conv": keys.positive_int("ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in header.tensors),
        "mamba_proj_bias": any(name.endswith(".ssm_in.bias") for name in header.tensors),
    }


_GGUF_NAMES = {
    **EXPERT_NAMES,
    **SHARED_NAMES,
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt": "mamba.dt",
    "ssm_a": "mamba.A",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
GRANITE4 = Family(
    model_type="granitemoehybrid",
    read=_granite4,
    rules=_rules,
    gguf=GGUFFamily(names=_GGUF_NAMES, config=_gguf_config, rules=_gguf_rules, permuted=True),
)
