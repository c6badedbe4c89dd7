"""Phi-MoE (Phi 3.5 MoE): sparsemixer routing, LayerNorms and biases, longrope."""

from __future__ import annotations

from typing import Any

from windlass.errors import UnsupportedError
from windlass.models.families.base import Family, GGUFFamily, layer_norm, read_decoder
from windlass.models.families.mixtral import block_sparse_rules
from windlass.models.families.moe import EXPERT_NAMES, gguf_expert_rules, read_routing
from windlass.models.fields import Fields
from windlass.models.gguf_header import GGUFHeader
from windlass.models.hparams import HParams, MoEHParams


def _phimoe(fields: Fields, architecture: str) -> HParams:
    layers = fields.positive_int("num_hidden_layers")
    routing = read_routing(fields, score="sigmoid")  # of what sparsemixer makes of the logits
    if routing.top_k != 2:
        raise UnsupportedError(
            f"{fields.source}: num_experts_per_tok is {routing.top_k}; sparsemixer routing chooses 2."
        )
    window = fields.positive_int("sliding_window") if "sliding_window" in fields else None
    if window is not None and window >= fields.positive_int("max_position_embeddings"):
        window = None
    has_bias = fields.flag("attention_bias", False)
    return read_decoder(
        fields,
        architecture,
        norm=layer_norm(fields, "rms_norm_eps"),
        windows=(window,) * layers,
        qkv_bias=has_bias,
        o_bias=has_bias,
        lm_head_bias=fields.flag("lm_head_bias", False),
        moe=MoEHParams(
            routing=routing,
            intermediate_size=fields.positive_int("intermediate_size"),
            layers=(True,) * layers,
            jitter=fields.number("router_jitter_noise", 0.01),
        ),
    )


def _gguf_config(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    return {
        "num_local_experts": keys.positive_int("expert_count"),
        "num_experts_per_tok": keys.positive_int("expert_used_count"),
        "lm_head_bias": "output.bias" in header.tensors,
        "sliding_window": keys.count("attention.sliding_window", 0) or None,
    }


PHIMOE = Family(
    model_type="phimoe",
    read=_phimoe,
    rules=block_sparse_rules,
    gguf=GGUFFamily(names=EXPERT_NAMES, config=_gguf_config, rules=gguf_expert_rules),
)
