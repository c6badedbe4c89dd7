"""GPT-2: learned positions, weights stored as [inputs, outputs], one projection for q, k and v."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from windlass.errors import UnsupportedError
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

_FIELDS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
}


def _gpt2(fields: Fields, architecture: str) -> HParams:
    for name, supported in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if fields.flag(name, supported) != supported:
            raise UnsupportedError(
                f"{fields.source}: {name} is {str(not supported).lower()}; only "
                f"{str(supported).lower()} is supported."
            )
    fields = fields.updated(**fields.renamed(_FIELDS))
    fields = fields.with_defaults(
        {"intermediate_size": 4 * fields.positive_int("hidden_size"), "tie_word_embeddings": True}
    )
    hparams = read_decoder(
        fields,
        architecture,
        norm=layer_norm(fields, "layer_norm_epsilon"),
        activation=activation(fields, "activation_function", "gelu_new"),
        gated_mlp=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    )
    return replace(
        hparams,
        layer_ropes=(None,) * hparams.num_layers,
        learned_positions=hparams.max_positions,
    )


def _rules(hparams: HParams) -> Sequence[Rule]:
    layer = "model.layers.*"
    rules = [
        Rule(pattern=r".*\.attn\.(masked_)?bias", name=""),  # the causal mask, in older files
    ]
    for prefix in ("transformer.", ""):  # the first published files have no prefix
        old = f"{prefix}h.*"
        rules += [
            *fused_qkv(hparams, f"{old}.attn.c_attn", transposed=True),
            *renames(
                {
                    f"{old}.attn.c_proj": f"{layer}.self_attn.o_proj",
                    f"{old}.mlp.c_fc": f"{layer}.mlp.up_proj",
                    f"{old}.mlp.c_proj": f"{layer}.mlp.down_proj",
                },
                transposed=True,
            ),
            *renames(
                {
                    f"{prefix}wte": "model.embed_tokens",
                    f"{prefix}wpe": "model.embed_positions",
                    f"{prefix}ln_f": "model.norm",
                    f"{old}.ln_1": f"{layer}.input_layernorm",
                    f"{old}.ln_2": f"{layer}.post_attention_layernorm",
                }
            ),
        ]
    return rules


def _gguf(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    del header
    return {"layer_norm_epsilon": keys.number("attention.layer_norm_epsilon")}


GPT2 = Family(
    model_type="gpt2",
    read=_gpt2,
    rules=_rules,
    gguf=GGUFFamily(
        names={"attn_qkv": "self_attn.qkv_proj"},
        outer_names={"position_embd": "model.embed_positions"},
        config=_gguf,
        rules=fused_qkv,
    ),
)
