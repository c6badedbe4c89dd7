"""Phi 3 and 4 (fused projections, longrope); Phi 1 to 2 (attention and MLP in parallel, biases)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from windlass.errors import UnsupportedError
from windlass.models.families.base import (
    Family,
    GGUFFamily,
    activation,
    fused_gate_up,
    fused_qkv,
    layer_norm,
    read_decoder,
)
from windlass.models.fields import Fields
from windlass.models.gguf_header import GGUFHeader
from windlass.models.hparams import HParams
from windlass.models.tensor_rules import Rule, renames


def _phi3(fields: Fields, architecture: str) -> HParams:
    fields = fields.with_defaults({"rms_norm_eps": 1e-5})
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.mapping(name)
        # Older configs call longrope by these names.
        old = [key for key in ("rope_type", "type") if rope.get(key) in ("su", "yarn")]
        if old:
            fields = fields.updated(**{name: {**rope, **dict.fromkeys(old, "longrope")}})
    window = fields.positive_int("sliding_window") if "sliding_window" in fields else None
    layers = fields.positive_int("num_hidden_layers")
    return read_decoder(fields, architecture, windows=(window,) * layers)


def _phi3_rules(hparams: HParams) -> Sequence[Rule]:
    return [*fused_qkv(hparams), *fused_gate_up(hparams)]


def _phi3_gguf(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    del header
    return {"sliding_window": keys.count("attention.sliding_window", 0) or None}


def _phi(fields: Fields, architecture: str) -> HParams:
    if fields.flag("qk_layernorm", False):
        raise UnsupportedError(f"{fields.source}: qk_layernorm is true; only false is supported.")
    return read_decoder(
        fields.with_defaults({"partial_rotary_factor": 0.5}),
        architecture,
        norm=layer_norm(fields, placement="parallel"),
        activation=activation(fields, default="gelu_new"),
        gated_mlp=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        lm_head_bias=True,
    )


def _phi_rules(hparams: HParams) -> Sequence[Rule]:
    del hparams
    layer = "model.layers.*"
    return renames(
        {
            f"{layer}.self_attn.dense": f"{layer}.self_attn.o_proj",
            f"{layer}.mlp.fc1": f"{layer}.mlp.up_proj",
            f"{layer}.mlp.fc2": f"{layer}.mlp.down_proj",
            "model.final_layernorm": "model.norm",
        }
    )


def _phi_gguf(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    del header
    return {
        "hidden_act": "gelu_new",
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
    }


_FUSED = {"attn_qkv": "self_attn.qkv_proj"}
PHI = Family(
    model_type="phi",
    read=_phi,
    rules=_phi_rules,
    gguf=GGUFFamily(names=_FUSED, config=_phi_gguf, rules=fused_qkv),
)
PHI3 = Family(
    model_type="phi3",
    read=_phi3,
    rules=_phi3_rules,
    gguf=GGUFFamily(
        names={**_FUSED, "ffn_up": "mlp.gate_up_proj"}, config=_phi3_gguf, rules=_phi3_rules
    ),
)
