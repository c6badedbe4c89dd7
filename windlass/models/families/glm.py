"""GLM 4 (Glm: partial interleaved RoPE, fused gate and up) and GLM 4 of 2025 (Glm4: also norms of outputs)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from windlass.models.families.base import (
    Family,
    GGUFFamily,
    fused_gate_up,
    fused_qkv,
    read_decoder,
)
from windlass.models.fields import Fields
from windlass.models.gguf_header import GGUFHeader
from windlass.models.hparams import HParams
from windlass.models.tensor_rules import Rule, renames


def _glm(fields: Fields, architecture: str) -> HParams:
    return read_decoder(
        fields.with_defaults(
            {"partial_rotary_factor": 0.5, "rms_norm_eps": 0.00000015625, "num_key_value_heads": 2}
        ),
        architecture,
        head_dim=128,
        qkv_bias=fields.flag("attention_bias", True),
        rope_interleaved=True,
    )


def _glm4(fields: Fields, architecture: str) -> HParams:
    hparams = _glm(fields, architecture)
    return replace(hparams, norm=replace(hparams.norm, placement="sandwich"))


def _glm4_rules(hparams: HParams) -> Sequence[Rule]:
    layer = "model.layers.*"
    return [
        *fused_gate_up(hparams),
        *renames(
            {
                f"{layer}.post_self_attn_layernorm": f"{layer}.post_attention_layernorm",
                f"{layer}.post_attention_layernorm": f"{layer}.pre_feedforward_layernorm",
                f"{layer}.post_mlp_layernorm": f"{layer}.post_feedforward_layernorm",
            }
        ),
    ]


def _gguf_rules(hparams: HParams) -> Sequence[Rule]:
    return [*fused_qkv(hparams), *fused_gate_up(hparams)]


def _gguf(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    del keys
    biases = {f"blk.0.attn_{part}.bias" for part in ("q", "qkv")}
    return {"attention_bias": not biases.isdisjoint(header.tensors)}


_NAMES = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
GLM = Family(
    model_type="glm",
    read=_glm,
    rules=fused_gate_up,
    gguf=GGUFFamily(names=_NAMES, config=_gguf, rules=_gguf_rules),
)
GLM4 = Family(
    model_type="glm4",
    read=_glm4,
    rules=_glm4_rules,
    gguf=GGUFFamily(
        names={
            **_NAMES,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        config=_gguf,
        rules=_gguf_rules,
    ),
)
