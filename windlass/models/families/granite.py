"""Granite 3 and dense Granite 4: Llama with multipliers of embeddings, residuals, scores and logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from windlass.errors import UnsupportedError
from windlass.models.families.base import Family, GGUFFamily, fused_gate_up, read_decoder
from windlass.models.fields import Fields
from windlass.models.gguf_header import GGUFHeader
from windlass.models.hparams import HParams
from windlass.models.tensor_rules import Rule, renames


def _granite(fields: Fields, architecture: str) -> HParams:
    bias = fields.flag("attention_bias", False)
    return read_decoder(
        fields,
        architecture,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        attention_scale=fields.number("attention_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
    )


def _granite4(fields: Fields, architecture: str) -> HParams:
    """Granite 4 without Mamba layers and experts."""
    kinds = fields.sequence("layer_types") or fields.sequence("layers_block_type") or ("mamba",)
    experts = fields.count("num_local_experts", 8)
    position = fields.text("position_embedding_type", None)
    if set(kinds) - {"attention", "full_attention"} or experts or position != "rope":
        raise UnsupportedError(
            f"{fields.source}: Granite 4 is supported without Mamba layers and experts, with RoPE; "
            f"layer_types are {', '.join(sorted(set(map(str, kinds))))}, num_local_experts is "
            f"{experts}, position_embedding_type is {position!r}."
        )
    inner = fields.positive_int("shared_intermediate_size", 1024)
    return _granite(fields.updated(intermediate_size=inner), architecture)


def _granite4_rules(hparams: HParams) -> Sequence[Rule]:
    mlp = "model.layers.*.shared_mlp"
    return [
        *fused_gate_up(hparams, f"{mlp}.input_linear"),
        *renames({f"{mlp}.output_linear": "model.layers.*.mlp.down_proj"}),
    ]


def _gguf(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    if not keys.flag("rope.scaling.finetuned", True):
        raise UnsupportedError(
            f"{header.path}: granite.rope.scaling.finetuned is false, for a model without RoPE; only "
            "models with RoPE are supported."
        )
    dim = keys.positive_int("embedding_length") // keys.positive_int("attention.head_count")
    return {
        "attention_multiplier": keys.number("attention.scale", dim**-0.5),
        **keys.renamed(
            {
                "embedding_scale": "embedding_multiplier",
                "residual_scale": "residual_multiplier",
                "logit_scale": "logits_scaling",
            }
        ),
    }


GRANITE = Family(model_type="granite", read=_granite, gguf=GGUFFamily(config=_gguf, permuted=True))
GRANITE4 = Family(model_type="granitemoehybrid", read=_granite4, rules=_granite4_rules)
