"""GPT-NeoX and Pythia: attention and MLP in parallel with a norm each; q, k and v of each head together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from windlass.models.families.base import (
    Family,
    GGUFFamily,
    activation,
    fused_qkv,
    layer_norm,
    read_decoder,
)
from windlass.models.fields import Fields
from windlass.models.gguf_header import GGUFHeader
from windlass.models.hparams import HParams
from windlass.models.tensor_rules import Rule, renames


def _gpt_neox(fields: Fields, architecture: str) -> HParams:
    own = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
    fields = fields.with_defaults(fields.renamed(own)).with_defaults(
        {"partial_rotary_factor": 0.25}
    )
    parallel = fields.flag("use_parallel_residual", True)
    bias = fields.flag("attention_bias", True)
    return read_decoder(
        fields,
        architecture,
        norm=layer_norm(fields, placement="parallel" if parallel else "pre", mlp_norm=parallel),
        activation=activation(fields, default="gelu"),
        gated_mlp=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
    )


def _rules(hparams: HParams) -> Sequence[Rule]:
    old, layer = "gpt_neox.layers.*", "model.layers.*"
    qkv = f"{old}.attention.query_key_value"
    return [
        *fused_qkv(hparams, qkv, groups=hparams.num_heads),
        *renames(
            {
                "gpt_neox.embed_in": "model.embed_tokens",
                "gpt_neox.final_layer_norm": "model.norm",
                "embed_out": "lm_head",
                f"{old}.input_layernorm": f"{layer}.input_layernorm",
                f"{old}.post_attention_layernorm": f"{layer}.post_attention_layernorm",
                f"{old}.attention.dense": f"{layer}.self_attn.o_proj",
                f"{old}.mlp.dense_h_to_4h": f"{layer}.mlp.up_proj",
                f"{old}.mlp.dense_4h_to_h": f"{layer}.mlp.down_proj",
            }
        ),
    ]


def _gguf(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    return {
        "hidden_act": "gelu",
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "attention_bias": "blk.0.attn_qkv.bias" in header.tensors,
        **keys.renamed({"use_parallel_residual": "use_parallel_residual"}),
    }


GPT_NEOX = Family(
    model_type="gpt_neox",
    read=_gpt_neox,
    rules=_rules,
    gguf=GGUFFamily(names={"attn_qkv": "self_attn.qkv_proj"}, config=_gguf, rules=fused_qkv),
)
