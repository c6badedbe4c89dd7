"""DeepSeek V2 and V3 (also R1, Kimi K2 and GLM 4.7 Flash): MLA, and experts chosen from the best groups.

V2 scores experts by a softmax and groups by their best expert; V3 scores by a sigmoid, and adds a
correction bias for the choice. The layers after num_hidden_layers draft (MTP, models/mtp.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from windlass.core.mla import LatentHeads
from windlass.core.moe import Routing
from windlass.errors import UnsupportedError
from windlass.models.families.base import Family, GGUFFamily, read_decoder
from windlass.models.families.moe import (
    EXPERT_NAMES,
    SHARED_NAMES,
    gguf_expert_rules,
    grouped_moe,
    read_routing,
    shared_expert_rules,
)
from windlass.models.fields import Fields
from windlass.models.gguf_header import GGUFHeader
from windlass.models.hparams import HParams, MLAHParams
from windlass.models.rope_config import RopeConfig
from windlass.models.tensor_rules import Rows, Rule

_SPLIT = "split_kv_b_proj"  # of GGUF files: kv_b_proj is two tensors


def _read(fields: Fields, architecture: str, routing: Routing | None) -> HParams:
    if fields.flag("attention_bias", False):
        raise UnsupportedError(
            f"{fields.source}: attention_bias is true; only MLA without biases is supported."
        )
    heads = LatentHeads(
        num_q=fields.positive_int("num_attention_heads"),
        nope_dim=fields.positive_int("qk_nope_head_dim"),
        rope_dim=fields.positive_int("qk_rope_head_dim"),
        rank=fields.positive_int("kv_lora_rank"),
        value_dim=fields.positive_int("v_head_dim"),
        interleaved=fields.flag("rope_interleave", True),
    )
    rope = RopeConfig.from_hf(fields, heads.rope_dim)
    hparams = read_decoder(
        fields,
        architecture,
        head_dim=heads.rope_dim,
        rope=rope,
        attention_scale=heads.query_dim**-0.5 * _mscale(rope) ** 2,
        mla=MLAHParams(heads=heads, q_rank=_q_rank(fields), split_up=fields.flag(_SPLIT, False)),
        moe=None if routing is None else grouped_moe(fields, routing),
        num_mtp_layers=fields.count("num_nextn_predict_layers", 0),
    )
    # To all that counts KV, the layers have one head of the latents' size.
    return replace(hparams, num_kv_heads=1, head_dim=heads.dim)


def _q_rank(fields: Fields) -> int | None:
    return fields.positive_int("q_lora_rank") if "q_lora_rank" in fields else None


def _mscale(rope: RopeConfig) -> float:
    """The factor of queries and keys that YaRN with mscale_all_dim moves into the scores' scale."""
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0


def _check(fields: Fields, name: str, supported: Sequence[str]) -> str:
    found = fields.text(name, supported[0])
    if found not in supported:
        raise UnsupportedError(
            f"{fields.source}: {name} {found!r} is not supported. Supported: {', '.join(supported)}."
        )
    return found


def _v2(fields: Fields, architecture: str) -> HParams:
    if "n_routed_experts" not in fields:
        return _read(fields, architecture, None)
    _check(fields, "scoring_func", ("softmax",))
    if fields.flag("norm_topk_prob", False):
        raise UnsupportedError(
            f"{fields.source}: norm_topk_prob is true, for which implementations of DeepSeek V2 differ; "
            "it is not supported."
        )
    limited = _check(fields, "topk_method", ("greedy", "group_limited_greedy")) != "greedy"
    groups = ("n_group", "topk_group") if limited else ()
    num_groups, top_groups = (fields.positive_int(name) for name in groups) if limited else (1, 1)
    routing = read_routing(
        fields,
        scale=fields.number("routed_scaling_factor", 1.0),
        num_groups=num_groups,
        top_groups=top_groups,
    )
    return _read(fields, architecture, routing)


def _v3(fields: Fields, architecture: str) -> HParams:
    _check(fields, "scoring_func", ("sigmoid",))
    _check(fields, "topk_method", ("noaux_tc",))
    routing = read_routing(
        fields,
        score="sigmoid",
        normalised=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 2.5),
        num_groups=fields.positive_int("n_group", 8),
        top_groups=fields.positive_int("topk_group", 4),
        group_score="top2",
    )
    return _read(fields, architecture, routing)


def _glm_lite(fields: Fields, architecture: str) -> HParams:
    """GLM 4.7 Flash: V3 with other defaults, and a list of the layers with experts."""
    kinds = list(fields.sequence("mlp_layer_types") or ("dense", "sparse"))
    first = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    if kinds != ["dense"] * first + ["sparse"] * (len(kinds) - first):
        raise UnsupportedError(
            f"{fields.source}: mlp_layer_types has a dense layer after one with experts; only dense "
            "layers before all others are supported."
        )
    known = {"first_k_dense_replace": first, "n_group": 1, "topk_group": 1}
    return _v3(fields.with_defaults({**known, "routed_scaling_factor": 1.8}), architecture)


def _gguf_config(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    """Both versions are deepseek2 to llama.cpp; the gating function tells them apart."""
    rope_dim = keys.positive_int("rope.dimension_count")
    key_dim, value_dim = (
        keys.positive_int(f"attention.{name}_mla", keys.positive_int(f"attention.{name}", 1))
        for name in ("key_length", "value_length")
    )
    is_sigmoid = keys.count("expert_gating_func", _SOFTMAX) == _SIGMOID
    groups = keys.count("expert_group_count", 0) or 1
    return {
        "architectures": ["DeepseekV3ForCausalLM" if is_sigmoid else "DeepseekV2ForCausalLM"],
        "qk_nope_head_dim": key_dim - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": value_dim,
        **keys.renamed(
            {
                "attention.q_lora_rank": "q_lora_rank",
                "attention.kv_lora_rank": "kv_lora_rank",
                "expert_count": "n_routed_experts",
                "expert_used_count": "num_experts_per_tok",
                "expert_feed_forward_length": "moe_intermediate_size",
                "expert_shared_count": "n_shared_experts",
                "leading_dense_block_count": "first_k_dense_replace",
            }
        ),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "topk_method": _gguf_method(is_sigmoid, groups),
        "n_group": groups,
        "topk_group": keys.count("expert_group_used_count", 0) or 1,
        _SPLIT: "blk.0.attn_k_b.weight" in header.tensors,
    }


def _gguf_method(is_sigmoid: bool, groups: int) -> str:
    if is_sigmoid:
        return "noaux_tc"
    return "greedy" if groups == 1 else "group_limited_greedy"


def _gguf_rules(hparams: HParams) -> Sequence[Rule]:
    whole = Rows(0, 1, 1)  # of all heads, as a matrix
    split = [
        Rule(pattern=rf"(.*\.{name}\.weight)", name=r"\1", rows=whole)
        for name in ("k_b_proj", "v_b_proj")
    ]
    assert hparams.mla is not None
    if hparams.mla.split_up:  # some files have the whole tensor, too
        split.append(Rule(pattern=r".*\.kv_b_proj\.weight", name=""))
    bias = Rule(pattern=r"(.*\.e_score_correction_bias)\.bias", name=r"\1")
    return [*split, bias, *(gguf_expert_rules(hparams) if hparams.moe is not None else ())]


_SOFTMAX, _SIGMOID = 1, 2  # llama.cpp's gating functions
_GGUF = GGUFFamily(
    names={
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.k_b_proj",
        "attn_v_b": "self_attn.v_b_proj",
        **EXPERT_NAMES,
        **SHARED_NAMES,
    },
    config=_gguf_config,
    rules=_gguf_rules,
)
DEEPSEEK_V2 = Family(model_type="deepseek_v2", read=_v2, rules=shared_expert_rules, gguf=_GGUF)
DEEPSEEK_V3 = Family(model_type="deepseek_v3", read=_v3, rules=shared_expert_rules, gguf=_GGUF)
GLM_MOE_LITE = Family(model_type="glm4_moe_lite", read=_glm_lite, rules=shared_expert_rules)
