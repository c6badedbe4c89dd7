"""Nemotron-H and Nemotron Nano 2 and 3: Mamba-2 layers with some attention layers between them, without RoPE.

In the files each mixer and each MLP is a layer of its own, in the order of a pattern (M: Mamba-2, *:
attention, -: MLP, E: mixture of experts). Here a layer is a mixer and the MLP behind it, if there is one. MLPs
and experts are squared ReLU without a gate; the norm of Mamba-2 has groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from windlass.core.moe import ExpertActivation
from windlass.core.recurrent import RecurrentHeads
from windlass.errors import CheckpointError, UnsupportedError
from windlass.models.families.base import Family, GGUFFamily, activation, read_decoder
from windlass.models.families.hybrid import (
    GGUF_MAMBA_NAMES,
    check_time_steps,
    gguf_mamba,
    gguf_mamba_rules,
    mamba_rules,
)
from windlass.models.families.moe import (
    EXPERT_NAMES,
    SHARED_NAMES,
    read_routing,
    stacked_expert_rules,
)
from windlass.models.fields import Fields
from windlass.models.gguf_header import GGUFHeader
from windlass.models.hparams import HParams, MoEHParams, NormHParams, RecurrentHParams
from windlass.models.tensor_rules import Rule, renames

# The kinds of layers in `layers_block_type`, as files of all versions name them.
_KINDS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}


@dataclass(frozen=True, slots=True)
class _Layer:
    """A mixer and the MLP behind it; -: dense, E: a mixture of experts, empty: none."""

    mixer: str
    mlp: str = ""


def _nemotron_h(fields: Fields, architecture: str) -> HParams:
    layers = _layers(fields)
    head_dim = next((n for n in ("head_dim", "attention_head_dim") if n in fields), "head_dim")
    bias, count = fields.flag("attention_bias", False), len(layers)
    eps = "layer_norm_epsilon" if "layer_norm_epsilon" in fields else "rms_norm_eps"
    has_moe = any(layer.mlp == "E" for layer in layers)
    if has_moe:  # files without dense layers may lack the field
        fields = fields.with_defaults(
            {"intermediate_size": fields.positive_int("moe_intermediate_size")}
        )
    return read_decoder(
        fields.updated(num_hidden_layers=count),
        architecture,
        head_dim=fields.positive_int(head_dim, 128),
        norm=NormHParams(eps=fields.number(eps, 1e-5)),
        activation=activation(fields, "mlp_hidden_act", "relu2"),
        gated_mlp=False,
        mlp_bias=fields.flag("mlp_bias", False),
        qkv_bias=bias,
        o_bias=bias,
        layer_ropes=(None,) * count,
        mlp_layers=tuple(bool(layer.mlp) for layer in layers),
        moe=_moe(fields, layers) if has_moe else None,
        recurrent=_mamba(fields, layers) if any(each.mixer == "M" for each in layers) else None,
    )


def _layers(fields: Fields) -> list[_Layer]:
    """The mixers with their MLPs, from the pattern."""
    kinds = fields.sequence("layers_block_type") or fields.sequence("layer_types")
    if kinds is None:
        pattern = fields.text("hybrid_override_pattern", "")
    else:
        pattern = "".join(_KINDS.get(str(kind), "?") for kind in kinds)
    layers: list[_Layer] = []
    for index, kind in enumerate(pattern):
        if kind not in "M*-E":
            found = pattern if kinds is None else kinds[index]
            raise UnsupportedError(
                f"{fields.source}: layer {index} is of an unknown kind in {found!r}; supported are M, "
                f"*, - and E, or {', '.join(_KINDS)}."
            )
        if kind in "M*":
            layers.append(_Layer(kind))
        elif layers and not layers[-1].mlp:
            layers[-1] = _Layer(layers[-1].mixer, kind)
        else:
            raise UnsupportedError(
                f"{fields.source}: layer {index} of the pattern {pattern} is an MLP that follows no "
                "Mamba-2 or attention layer, which is not supported."
            )
    if not layers:
        raise CheckpointError(
            f"{fields.source}: neither layers_block_type nor hybrid_override_pattern lists a layer."
        )
    return layers


def _moe(fields: Fields, layers: list[_Layer]) -> MoEHParams:
    if "moe_latent_size" in fields:
        raise UnsupportedError(
            f"{fields.source}: moe_latent_size {fields.positive_int('moe_latent_size')} is not "
            "supported, only experts of the hidden size."
        )
    num_shared = fields.count("n_shared_experts", 1)
    if num_shared > 1:
        raise UnsupportedError(
            f"{fields.source}: n_shared_experts is {num_shared}; only 0 and 1 are supported."
        )
    if fields.flag("mlp_bias", False):
        raise UnsupportedError(f"{fields.source}: mlp_bias is not supported with experts.")
    return MoEHParams(
        routing=read_routing(
            fields,
            score="sigmoid",
            normalised=fields.flag("norm_topk_prob", True),
            scale=fields.number("routed_scaling_factor", 1.0),
            num_groups=fields.positive_int("n_group", 1),
            top_groups=fields.positive_int("topk_group", 1),
            group_score="top2",
        ),
        intermediate_size=fields.positive_int("moe_intermediate_size"),
        layers=tuple(layer.mlp == "E" for layer in layers),
        activation=ExpertActivation(kind="relu2"),
        correction_bias=True,
        shared_intermediate_size=num_shared
        and fields.positive_int("moe_shared_expert_intermediate_size"),
    )


def _mamba(fields: Fields, layers: list[_Layer]) -> RecurrentHParams:
    check_time_steps(fields, "mamba_hidden_act")
    groups = fields.positive_int("n_groups", 8)
    heads = RecurrentHeads(
        num_heads=fields.positive_int("mamba_num_heads", 128),
        dim=fields.positive_int("mamba_head_dim", 64),
        num_groups=groups,
        state_size=fields.positive_int("ssm_state_size", 128),
        conv_size=fields.positive_int("conv_kernel", 4),
    )
    if heads.num_heads % groups:
        raise CheckpointError(
            f"{fields.source}: mamba_num_heads ({heads.num_heads}) is not a multiple of n_groups "
            f"({groups})."
        )
    return RecurrentHParams(
        kind="mamba",
        heads=heads,
        layers=tuple(layer.mixer == "M" for layer in layers),
        conv_bias=fields.flag("use_conv_bias", True),
        proj_bias=fields.flag("use_bias", False),
        norm_groups=groups,
    )


def _file_layers(hparams: HParams) -> Iterator[tuple[int, int, bool]]:
    """The layers of the file: their number, the network's, and whether it is the MLP of that."""
    number = 0
    for layer in range(hparams.num_layers):
        for is_mlp in (False, True)[: 2 if hparams.has_mlp(layer) else 1]:
            yield number, layer, is_mlp
            number += 1


def _layer_rules(hparams: HParams) -> list[Rule]:
    """Rules for the numbers of layers, and for the modules of each kind. transformers calls them model.layers."""
    rules = [
        *renames({"backbone.embeddings": "model.embed_tokens", "backbone.norm_f": "model.norm"})
    ]
    rules.append(Rule(pattern=r"mtp\..*", name=""))
    for number, layer, is_mlp in _file_layers(hparams):
        mixer = "mamba" if hparams.is_recurrent(layer) else "self_attn"
        module, norm = ("mlp", "post_attention") if is_mlp else (mixer, "input")
        file, own = rf"(?:backbone|model)\.layers\.{number}", f"model.layers.{layer}"
        rules += [
            Rule(pattern=rf"{file}\.norm\.weight", name=f"{own}.{norm}_layernorm.weight"),
            Rule(pattern=rf"{file}\.mixer\.(.*)", name=rf"{own}.{module}.\1"),
        ]
    return rules


def _rules(hparams: HParams) -> list[Rule]:
    return [
        Rule(pattern=r"(.*\.mlp)\.shared_experts\.(.*)", name=r"\1.shared_expert.\2"),
        Rule(
            pattern=r"(.*\.mlp)\.gate\.e_score_correction_bias",
            name=r"\1.experts.e_score_correction_bias",
        ),
        *mamba_rules(hparams),
    ]


def _gguf_layer_rules(hparams: HParams) -> list[Rule]:
    """Rules for the numbers of layers; llama.cpp's norms of MLPs are named as those of mixers."""
    rules = []
    for number, layer, is_mlp in _file_layers(hparams):
        file, own = rf"model\.layers\.{number}", f"model.layers.{layer}"
        norm = "post_attention_layernorm" if is_mlp else "input_layernorm"
        rules += [
            Rule(pattern=rf"{file}\.input_layernorm\.weight", name=f"{own}.{norm}.weight"),
            Rule(pattern=rf"{file}\.(?!input_layernorm)(.*)", name=rf"{own}.\1"),
        ]
    last = sum(1 for _ in _file_layers(hparams))
    numbers = "|".join(str(number) for number in range(last))
    return [*rules, Rule(pattern=rf"model\.layers\.(?!(?:{numbers})\.).*", name="")]  # MTP


def _gguf_rules(hparams: HParams) -> list[Rule]:
    rules = [Rule(pattern=r"(.*\.e_score_correction_bias)\.bias", name=r"\1")]
    if hparams.moe is not None:
        count, inner = hparams.moe.routing.num_experts, hparams.moe.intermediate_size
        for part, rows in (("up_proj", inner), ("down_proj", hparams.hidden_size)):
            name = rf"\1.{{expert}}.{part}.weight"
            rules += stacked_expert_rules(rf"(.*\.experts)\.{part}\.weight", name, count, rows)
    return [*rules, *gguf_mamba_rules(hparams)]


def _gguf_config(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    """A layer's kind shows in its tensors."""
    kinds = {"ssm_in": "mamba", "attn_q": "attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}
    num_mtp = keys.count("nextn_predict_layers", 0)
    listed = []
    for layer in range(keys.positive_int("block_count") - num_mtp):
        found = (
            kind for name, kind in kinds.items() if f"blk.{layer}.{name}.weight" in header.tensors
        )
        listed.append(next(found, "none"))
    names = {
        "expert_count": "n_routed_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        "expert_shared_count": "n_shared_experts",
        "expert_weights_norm": "norm_topk_prob",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
        "moe_latent_size": "moe_latent_size",
        "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    }
    found_mamba = gguf_mamba(keys, header)
    return {
        **keys.renamed(names),
        "layers_block_type": listed,
        "mamba_num_heads": found_mamba["mamba_n_heads"],
        "mamba_head_dim": found_mamba["mamba_d_head"],
        "n_groups": found_mamba["mamba_n_groups"],
        "ssm_state_size": found_mamba["mamba_d_state"],
        "conv_kernel": found_mamba["mamba_d_conv"],
        "use_conv_bias": found_mamba["mamba_conv_bias"],
        "use_bias": found_mamba["mamba_proj_bias"],
        "attention_bias": any(name.endswith(".attn_q.bias") for name in header.tensors),
        "mlp_bias": any(name.endswith(".ffn_up.bias") for name in header.tensors),
    }


NEMOTRON_H = Family(
    model_type="nemotron_h",
    read=_nemotron_h,
    rules=_rules,
    outer_rules=_layer_rules,
    gguf=GGUFFamily(
        names={**EXPERT_NAMES, **SHARED_NAMES, **GGUF_MAMBA_NAMES},
        config=_gguf_config,
        outer_rules=_gguf_layer_rules,
        rules=_gguf_rules,
    ),
)
