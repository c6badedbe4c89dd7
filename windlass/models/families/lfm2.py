"""LFM2 and LFM2 MoE: gated short convolutions, with attention in some layers.

q and k are normalised in each head. Every layer has a dense MLP; of LFM2 MoE all but the first ones have a
mixture of experts, chosen by sigmoid scores with a bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from windlass.core.recurrent import RecurrentHeads
from windlass.errors import UnsupportedError
from windlass.models.families.base import Family, GGUFFamily, read_decoder
from windlass.models.families.hybrid import listed_layers
from windlass.models.families.moe import EXPERT_NAMES, gguf_expert_rules, read_routing
from windlass.models.fields import Fields
from windlass.models.gguf_header import GGUFHeader
from windlass.models.hparams import HParams, MoEHParams, NormHParams, RecurrentHParams
from windlass.models.tensor_rules import Rule, renames, split

_LAYER = "model.layers.*"
_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_NAMES = {
    "model.embedding_norm": "model.norm",
    f"{_LAYER}.operator_norm": f"{_LAYER}.input_layernorm",
    f"{_LAYER}.ffn_norm": f"{_LAYER}.post_attention_layernorm",
    f"{_LAYER}.self_attn.q_layernorm": f"{_LAYER}.self_attn.q_norm",
    f"{_LAYER}.self_attn.k_layernorm": f"{_LAYER}.self_attn.k_norm",
    f"{_LAYER}.self_attn.out_proj": f"{_LAYER}.self_attn.o_proj",
    f"{_LAYER}.feed_forward.gate": f"{_LAYER}.mlp.gate",
    **{f"{_LAYER}.feed_forward.{name}": f"{_LAYER}.mlp.{part}" for name, part in _PARTS.items()},
}
_SIGMOID = 2  # of expert_gating_func in GGUF files


def _lfm2(fields: Fields, architecture: str) -> HParams:
    fields = fields.updated(**fields.renamed({"block_ff_dim": "intermediate_size"}))
    return _read(fields.updated(intermediate_size=_intermediate_size(fields)), architecture)


def _lfm2_moe(fields: Fields, architecture: str) -> HParams:
    first = fields.count("num_dense_layers", 2)
    moe = MoEHParams(
        routing=read_routing(
            fields,
            score="sigmoid",
            normalised=fields.flag("norm_topk_prob", True),
            scale=fields.number("routed_scaling_factor", 1.0),
        ),
        intermediate_size=fields.positive_int("moe_intermediate_size"),
        layers=tuple(layer >= first for layer in range(fields.positive_int("num_hidden_layers"))),
        correction_bias=fields.flag("use_expert_bias", True),
    )
    return _read(fields, architecture, moe=moe)


def _read(fields: Fields, architecture: str, **known: Any) -> HParams:
    fields = fields.updated(**fields.renamed({"tie_embedding": "tie_word_embeddings"}))
    fields = fields.with_defaults({"rope_theta": 1e6, "tie_word_embeddings": True})
    layers, bias = _conv_layers(fields), fields.flag("conv_bias", False)
    recurrent = RecurrentHParams(
        kind="conv",
        heads=RecurrentHeads.of_conv(
            fields.positive_int("hidden_size"), fields.positive_int("conv_L_cache", 3)
        ),
        layers=layers,
        conv_bias=bias,
        proj_bias=bias,
    )
    return read_decoder(
        fields,
        architecture,
        norm=NormHParams(eps=fields.number("norm_eps", 1e-5)),
        qk_norm="head",
        recurrent=recurrent if any(layers) else None,
        **known,
    )


def _conv_layers(fields: Fields) -> tuple[bool, ...]:
    """Whether each layer is a convolution; without any list all layers have attention."""
    listed = listed_layers(fields, ("conv",), ("full_attention",))
    if listed is not None:
        return listed
    layers = range(fields.positive_int("num_hidden_layers"))
    attention = fields.sequence("full_attn_idxs")
    return tuple(attention is not None and layer not in attention for layer in layers)


def _intermediate_size(fields: Fields) -> int:
    """The size of the MLP: two thirds of the configured one, rounded up, if it is adjusted."""
    size = fields.positive_int("intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(fields.number("block_ffn_dim_multiplier", 1.0) * (2 * size // 3))
    multiple = fields.positive_int("block_multiple_of", 256)
    return -(-size // multiple) * multiple


def _rules(hparams: HParams) -> Sequence[Rule]:
    experts = [
        Rule(
            pattern=rf"(model\.layers\.\d+)\.feed_forward\.experts\.(\d+)\.{name}\.(\w+)",
            name=rf"\1.mlp.experts.\2.{part}.\3",
        )
        for name, part in _PARTS.items()
    ]
    bias = Rule(
        pattern=r"(model\.layers\.\d+)\.feed_forward\.expert_bias",
        name=r"\1.mlp.experts.e_score_correction_bias",
    )
    return [*renames(_NAMES), *experts, bias, *_conv_rules(hparams)]


def _conv_rules(hparams: HParams) -> list[Rule]:
    conv, hidden = f"{_LAYER}.conv", hparams.hidden_size
    parts = {f"{conv}.{part}_proj": hidden for part in "bcx"}
    return [
        *split(f"{conv}.in_proj", parts),
        *split(f"{conv}.conv", {f"{conv}.x_conv": hidden}),
    ]


def _gguf_rules(hparams: HParams) -> list[Rule]:
    return [
        Rule(pattern=r"(.*\.e_score_correction_bias)\.bias", name=r"\1"),
        *([] if hparams.moe is None else gguf_expert_rules(hparams)),
        *_conv_rules(hparams),
    ]


def _gguf_config(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    layers = range(keys.positive_int("block_count"))
    attention = [layer for layer in layers if f"blk.{layer}.attn_q.weight" in header.tensors]
    return {
        "norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": keys.positive_int("shortconv.l_cache"),
        "layer_types": ["full_attention" if layer in attention else "conv" for layer in layers],
        "block_auto_adjust_ff_dim": False,
    }


def _gguf_moe_config(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    """llama.cpp normalises the weights of the experts, and does not scale them."""
    gating = keys.count("expert_gating_func", _SIGMOID)
    if gating != _SIGMOID:
        raise UnsupportedError(
            f"{header.path}: lfm2moe.expert_gating_func is {gating}; only {_SIGMOID} (sigmoid) is "
            "supported."
        )
    names = {
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "leading_dense_block_count": "num_dense_layers",
    }
    return {
        **_gguf_config(keys, header),
        **keys.renamed(names),
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in header.tensors),
    }


_GGUF_NAMES = {
    **EXPERT_NAMES,
    "exp_probs_b": "mlp.experts.e_score_correction_bias",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
}
_GGUF_OUTER_NAMES = {"token_embd_norm": "model.norm"}
LFM2 = Family(
    model_type="lfm2",
    read=_lfm2,
    rules=_rules,
    gguf=GGUFFamily(
        names=_GGUF_NAMES, outer_names=_GGUF_OUTER_NAMES, config=_gguf_config, rules=_gguf_rules
    ),
)
LFM2_MOE = Family(
    model_type="lfm2_moe",
    read=_lfm2_moe,
    rules=_rules,
    gguf=GGUFFamily(
        names=_GGUF_NAMES,
        outer_names=_GGUF_OUTER_NAMES,
        config=_gguf_moe_config,
        rules=_gguf_rules,
    ),
)
