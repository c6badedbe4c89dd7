"""GLM 4.5 MoE: sigmoid routing with a correction bias, shared experts, partial RoPE, optional q/k norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from windlass.models.hparams import HParams
from windlass.models.tensor_rules import Rule


def _glm_moe(fields: Fields, architecture: str) -> HParams:
    routing = read_routing(
        fields,
        score="sigmoid",
        normalised=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        num_groups=fields.positive_int("n_group", 1),
        top_groups=fields.positive_int("topk_group", 1),
        group_score="top2",
    )
    return read_decoder(
        fields,
        architecture,
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm="head" if fields.flag("use_qk_norm", False) else None,
        moe=grouped_moe(fields, routing),
        num_mtp_layers=fields.count("num_nextn_predict_layers", 0),
    )


def _gguf_config(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    num_mtp_layers = keys.count("nextn_predict_layers", 0)
    names = {
        "expert_count": "n_routed_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_count": "n_shared_experts",
        "leading_dense_block_count": "first_k_dense_replace",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_weights_norm": "norm_topk_prob",
    }
    return {
        **keys.renamed(names),
        # The last blocks are for drafting (MTP).
        "num_hidden_layers": keys.positive_int("block_count") - num_mtp_layers,
        "num_nextn_predict_layers": num_mtp_layers,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors,
    }


def _gguf_rules(hparams: HParams) -> Sequence[Rule]:
    layers = "|".join(str(layer) for layer in range(hparams.num_layers))
    return [
        Rule(pattern=r"(.*\.e_score_correction_bias)\.bias", name=r"\1"),
        Rule(pattern=rf"model\.layers\.(?!(?:{layers})\.).*", name=""),
        *gguf_expert_rules(hparams),
    ]


GLM_MOE = Family(
    model_type="glm4_moe",
    read=_glm_moe,
    rules=shared_expert_rules,
    gguf=GGUFFamily(
        names={
            **EXPERT_NAMES,
            **SHARED_NAMES,
            "post_attention_norm": "post_attention_layernorm",
            "nextn.eh_proj": "eh_proj",
            "nextn.enorm": "enorm",
            "nextn.hnorm": "hnorm",
            "nextn.embed_tokens": "embed_tokens",
            "nextn.shared_head_norm": "shared_head.norm",
            "nextn.shared_head_head": "shared_head.head",
        },
        config=_gguf_config,
        rules=_gguf_rules,
    ),
)
