"""Qwen3-Next and Qwen 3.5: gated delta nets, with gated attention in every fourth layer.

Norms of the residual stream and of q and k are zero-centred: they multiply by 1 + w. RoPE rotates a
quarter of each head. MLPs are dense, or mixtures with a shared expert that has a gate. The layers for
drafting (MTP) are not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from windlass.core.recurrent import RecurrentHeads
from windlass.errors import CheckpointError, UnsupportedError
from windlass.models.families.base import Family, GGUFFamily, read_decoder
from windlass.models.families.hybrid import listed_layers
from windlass.models.families.moe import (
    EXPERT_NAMES,
    gguf_expert_rules,
    gguf_experts,
    stacked_expert_rules,
)
from windlass.models.families.qwen import GGUF_SHARED_NAMES, with_shared_expert
from windlass.models.fields import Fields
from windlass.models.gguf_header import GGUFHeader
from windlass.models.hparams import HParams, NormHParams, RecurrentHParams
from windlass.models.tensor_rules import Rule, split

_LINEAR, _FULL = "linear_attention", "full_attention"
_MIXER = "model.layers.*.linear_attn"
# The parts of the mixer's input projections, as files have them. Those of Qwen3-Next, qkvz and ba, repeat
# in every group of heads that share a key.
_PARTS = {
    "in_proj_qkvz": ("q_proj", "k_proj", "v_proj", "gate_proj"),
    "in_proj_ba": ("beta_proj", "dt_proj"),
    "in_proj_qkv": ("q_proj", "k_proj", "v_proj"),
    "in_proj_z": ("gate_proj",),
    "in_proj_b": ("beta_proj",),
    "in_proj_a": ("dt_proj",),
}
_FILE_MODULE = re.compile(r"in_proj_(?:qkvz|ba|qkv|z|b|a)\b")


def _qwen3_next(fields: Fields, architecture: str) -> HParams:
    inner = fields.positive_int("moe_intermediate_size", 512)
    fields = fields.with_defaults({"moe_intermediate_size": inner, "intermediate_size": inner})
    return with_shared_expert(fields, _read(fields, architecture), normalised=True)


def _qwen3_5(fields: Fields, architecture: str) -> HParams:
    return _read(fields, architecture)


def _read(fields: Fields, architecture: str) -> HParams:
    """Read what the generations share."""
    fields = fields.with_defaults({"partial_rotary_factor": 0.25})
    if not fields.flag("attn_output_gate", True):
        raise UnsupportedError(
            f"{fields.source}: attn_output_gate is false; only attention with output gates is supported."
        )
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedError(
            f"{fields.source}: hidden_act {activation!r} is not supported with gated delta nets, only "
            "silu."
        )
    bias, kinds = fields.flag("attention_bias", False), _layer_kinds(fields)
    return read_decoder(
        fields.updated(quantization_config=_with_parts(fields.mapping("quantization_config"))),
        architecture,
        head_dim=256,
        norm=NormHParams(eps=fields.number("rms_norm_eps", 1e-6), float32=True),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        attention_gates=True,
        recurrent=_recurrent(fields, kinds) if any(kinds) else None,
    )


def _layer_kinds(fields: Fields) -> tuple[bool, ...]:
    """Whether each layer is a gated delta net."""
    listed = listed_layers(fields, (_LINEAR,), (_FULL,))
    if listed is not None:
        return listed
    layers, step = (
        fields.positive_int("num_hidden_layers"),
        fields.positive_int("full_attention_interval", 4),
    )
    return tuple((layer + 1) % step != 0 for layer in range(layers))


def _recurrent(fields: Fields, kinds: tuple[bool, ...]) -> RecurrentHParams:
    heads = fields.positive_int("linear_num_value_heads", 32)
    groups = fields.positive_int("linear_num_key_heads", 16)
    if heads % groups:
        raise CheckpointError(
            f"{fields.source}: linear_num_value_heads ({heads}) is not a multiple of "
            f"linear_num_key_heads ({groups})."
        )
    return RecurrentHParams(
        kind="delta",
        heads=RecurrentHeads(
            num_heads=heads,
            dim=fields.positive_int("linear_value_head_dim", 128),
            num_groups=groups,
            state_size=fields.positive_int("linear_key_head_dim", 128),
            conv_size=fields.positive_int("linear_conv_kernel_dim", 4),
            tiled=fields.flag("linear_tiled_heads", False),  # of GGUF files
        ),
        layers=kinds,
        conv_bias=False,
    )


def _with_parts(value: Any) -> Any:
    """The settings of a weight format with the names of the network's modules."""
    if isinstance(value, str):
        return _FILE_MODULE.sub(lambda found: f"(?:{'|'.join(_PARTS[found[0]])})", value)
    if isinstance(value, Mapping):
        return {_with_parts(key): _with_parts(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [name for each in value for name in _names(each)]
    return value


def _names(value: Any) -> list[Any]:
    """A module's name gives those of its parts; a pattern stays one pattern."""
    if not isinstance(value, str) or value.startswith("re:"):
        return [_with_parts(value)]
    found = _FILE_MODULE.search(value)
    parts = _PARTS[found[0]] if found else ()
    return [_FILE_MODULE.sub(part, value) for part in parts] or [value]


def _rules(hparams: HParams) -> list[Rule]:
    layers = r"model\.layers\.\d+"
    norms = rf"{layers}\.(?:input_layernorm|post_attention_layernorm|self_attn\.[qk]_norm)"
    return [
        Rule(pattern=r"(?:model\.)?mtp\..*", name=""),
        Rule(pattern=rf"({norms}|model\.norm)\.weight", name=r"\1.weight", add=1.0),
        Rule(pattern=r"(.*\.linear_attn)\.A_log", name=r"\1.A", log=True),
        *_mixer_rules(hparams),
        *_expert_rules(hparams),
    ]


def _mixer_rules(hparams: HParams) -> list[Rule]:
    if hparams.recurrent is None:
        return []
    heads = hparams.recurrent.heads
    sizes = dict.fromkeys(("q", "k"), heads.group_features)
    sizes |= dict.fromkeys(("v", "gate"), heads.inner)
    sizes |= dict.fromkeys(("beta", "dt"), heads.num_heads)
    rules = split(f"{_MIXER}.conv1d", {f"{_MIXER}.{each}_conv": sizes[each] for each in "qkv"})
    for module, names in _PARTS.items():
        parts = {f"{_MIXER}.{name}": sizes[name.removesuffix("_proj")] for name in names}
        groups = heads.num_groups if module in ("in_proj_qkvz", "in_proj_ba") else 1
        rules += split(f"{_MIXER}.{module}", parts, groups=groups)
    return rules


def _expert_rules(hparams: HParams) -> list[Rule]:
    """Rules for stacked experts, as Qwen 3.5 is published; Qwen3-Next has the names of the network."""
    if hparams.moe is None:
        return []
    count, inner = hparams.moe.routing.num_experts, hparams.moe.intermediate_size
    both, down = (rf"(.*\.experts)\.{part}(?:\.weight)?" for part in ("gate_up_proj", "down_proj"))
    return [
        *stacked_expert_rules(both, r"\1.{expert}.gate_proj.weight", count, 2 * inner, (0, inner)),
        *stacked_expert_rules(
            both, r"\1.{expert}.up_proj.weight", count, 2 * inner, (inner, 2 * inner)
        ),
        *stacked_expert_rules(down, r"\1.{expert}.down_proj.weight", count, hparams.hidden_size),
    ]


def _gguf_rules(hparams: HParams) -> list[Rule]:
    layers = "|".join(str(layer) for layer in range(hparams.num_layers))
    return [
        Rule(pattern=rf"model\.layers\.(?!(?:{layers})\.).*", name=""),  # MTP
        Rule(pattern=r"(.*\.linear_attn)\.dt\.bias", name=r"\1.dt_bias"),
        *_mixer_rules(hparams),
        *([] if hparams.moe is None else gguf_expert_rules(hparams)),
    ]


def _gguf_config(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    heads, inner = keys.positive_int("ssm.time_step_rank"), keys.positive_int("ssm.inner_size")
    experts: dict[str, Any] = {}
    if keys.count("expert_count", 0):
        shared = keys.positive_int("expert_shared_feed_forward_length")
        experts = gguf_experts(keys, norm_topk_prob=True)
        experts["shared_expert_intermediate_size"] = shared
    mtp_layers = keys.count("nextn_predict_layers", 0)
    return {
        # The last blocks are for drafting (MTP).
        "num_hidden_layers": keys.positive_int("block_count") - mtp_layers,
        "full_attention_interval": keys.positive_int("full_attention_interval", 4),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
        "linear_num_key_heads": keys.positive_int("ssm.group_count"),
        "linear_key_head_dim": keys.positive_int("ssm.state_size"),
        "linear_conv_kernel_dim": keys.positive_int("ssm.conv_kernel"),
        "attention_bias": any(name.endswith(".attn_q.bias") for name in header.tensors),
        **experts,
    }


def _tiled(
    config: Callable[[Fields, GGUFHeader], dict[str, Any]],
) -> Callable[[Fields, GGUFHeader], dict[str, Any]]:
    """llama.cpp's converter sorts the value heads of Qwen 3.5: one of each group, then the next ones."""
    return lambda keys, header: config(keys, header) | {"linear_tiled_heads": True}


_MTP_NAMES = {
    f"nextn.{name}": f"mtp.{name}"
    for name in (
        "eh_proj",
        "enorm",
        "hnorm",
        "embed_tokens",
        "shared_head_norm",
        "shared_head_head",
    )
}
_GGUF_NAMES = {
    **EXPERT_NAMES,
    **GGUF_SHARED_NAMES,
    **_MTP_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",  # of older files
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt",
    "ssm_a": "linear_attn.A",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_GGUF = GGUFFamily(names=_GGUF_NAMES, config=_gguf_config, rules=_gguf_rules)
_GGUF_TILED = replace(_GGUF, config=_tiled(_gguf_config))
QWEN3_NEXT = Family(model_type="qwen3_next", read=_qwen3_next, rules=_rules, gguf=_GGUF)
QWEN3_5 = Family(model_type="qwen3_5_text", read=_qwen3_5, rules=_rules, gguf=_GGUF_TILED)
QWEN3_5_MOE = Family(
    model_type="qwen3_5_moe_text", read=_qwen3_next, rules=_rules, gguf=_GGUF_TILED
)
