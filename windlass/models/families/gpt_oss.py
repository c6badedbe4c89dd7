"""gpt-oss: attention sinks, alternating windows, experts in MXFP4 with biases and a clamped activation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from windlass.core.moe import ExpertActivation
from windlass.models.families.base import Family, GGUFFamily, layer_windows, read_decoder
from windlass.models.families.moe import EXPERT_NAMES, gguf_expert_rules, read_routing
from windlass.models.fields import Fields
from windlass.models.gguf_header import GGUFHeader
from windlass.models.hparams import HParams, MoEHParams
from windlass.models.tensor_rules import Rule


def _gpt_oss(fields: Fields, architecture: str) -> HParams:
    layers = fields.positive_int("num_hidden_layers")
    window = fields.positive_int("sliding_window", 128)
    windows = layer_windows(fields, window)
    if windows is None:
        windows = tuple(window if layer % 2 == 0 else None for layer in range(layers))
    activation = ExpertActivation(
        kind="clamped",
        interleaved=fields.flag("interleaved_experts", True),
        alpha=fields.number("swiglu_alpha", 1.702),
        limit=fields.number("swiglu_limit", 7.0),
    )
    moe = MoEHParams(
        # The softmax of the chosen experts' logits.
        routing=read_routing(fields, normalised=True),
        intermediate_size=fields.positive_int("intermediate_size"),
        layers=(True,) * layers,
        activation=activation,
        router_bias=True,
        expert_bias=True,
    )
    bias = fields.flag("attention_bias", True)
    return read_decoder(
        fields,
        architecture,
        head_dim=64,
        windows=windows,
        qkv_bias=bias,
        o_bias=bias,
        attention_sinks=True,
        moe=moe,
    )


def _rules(hparams: HParams) -> Sequence[Rule]:
    return [
        Rule(pattern=r"(.*)\.mlp\.router\.(\w+)", name=r"\1.mlp.gate.\2"),
        *_expert_rules(hparams),
    ]


def _expert_rules(hparams: HParams) -> Iterator[Rule]:
    """Split the stacks: bf16 [experts, inputs, outputs], MXFP4 and biases [experts, outputs, ...]."""
    assert hparams.moe is not None
    for expert in range(hparams.moe.routing.num_experts):
        for part in ("gate_up_proj", "down_proj"):
            stack, name = rf"(.*)\.experts\.{part}", rf"\1.experts.{expert}.{part}"
            yield Rule(pattern=stack, name=f"{name}.weight", index=expert, transposed=True)
            for suffix in ("bias", "blocks", "scales"):
                yield Rule(pattern=f"{stack}_{suffix}", name=f"{name}.{suffix}", index=expert)


def _gguf_config(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    del header
    names = {
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "intermediate_size",
        "attention.sliding_window": "sliding_window",
    }
    # llama.cpp's converter separates gate and up rows.
    # Files do not store that YaRN's ramp has fractional ends.
    extra = {"interleaved_experts": False, "rope_scaling": {"truncate": False}}
    return {**keys.renamed(names), **extra}


def _gguf_rules(hparams: HParams) -> Sequence[Rule]:
    return [Rule(pattern=r"(.*\.sinks)\.weight", name=r"\1"), *gguf_expert_rules(hparams)]


GPT_OSS = Family(
    model_type="gpt_oss",
    read=_gpt_oss,
    rules=_rules,
    gguf=GGUFFamily(
        names={
            **EXPERT_NAMES,
            "attn_sinks": "self_attn.sinks",
            "post_attention_norm": "post_attention_layernorm",
        },
        config=_gguf_config,
        rules=_gguf_rules,
    ),
)
