"""Gemma 4 (text): layers with a window and without have heads of different sizes; values are normalised.

E2B and E4B: each layer gets an embedding of the token, and the last layers read the keys and values of
earlier ones. Checkpoints with vision and audio parts load without them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from windlass.core.moe import ExpertActivation
from windlass.errors import CheckpointError, UnsupportedError
from windlass.models.families.base import (
    Family,
    GGUFFamily,
    activation,
    layer_windows,
    read_decoder,
)
from windlass.models.families.moe import (
    gguf_expert_rules,
    read_routing,
    stacked_expert_rules,
)
from windlass.models.families.with_images import rename_modules, text_fields
from windlass.models.fields import Fields
from windlass.models.gguf_header import GGUFHeader
from windlass.models.hparams import HParams, KVHeads, MoEHParams, NormHParams, PerLayerInputs
from windlass.models.rope_config import RopeConfig
from windlass.models.tensor_rules import Rule

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_144,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
}
_GLOBAL_HEAD_DIM = 512
_ROPES: dict[str, dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}
# Modules of the file by their names in the network.
_PER_LAYER = {
    "per_layer_input_gate": "per_layer.input_gate",
    "per_layer_projection": "per_layer.projection",
    "post_per_layer_input_norm": "per_layer.norm",
}
_PER_LAYER_OUTER = {
    "embed_tokens_per_layer": "per_layer.embed_tokens",
    "per_layer_model_projection": "per_layer.projection",
    "per_layer_projection_norm": "per_layer.norm",
}


# Tensors of the file by their names in the mixture of experts.
_EXPERTS = {
    r"router\.proj\.weight": "gate.weight",
    r"router\.scale": "router_norm.weight",
    r"router\.per_expert_scale": "experts.per_expert_scale",
    r"pre_feedforward_layernorm_2\.weight": "input_norm.weight",
    r"post_feedforward_layernorm_1\.weight": "dense_norm.weight",
    r"post_feedforward_layernorm_2\.weight": "output_norm.weight",
}


def _gemma4(fields: Fields, architecture: str) -> HParams:
    fields = fields.with_defaults(_DEFAULTS)
    _refuse(fields)
    formats = rename_modules(fields.mapping("quantization_config"), _in_network)
    fields = fields.updated(quantization_config=formats)
    windows = _windows(fields)
    kv_heads = _kv_heads(fields, windows)
    ropes = {
        window is None: _rope(fields, window, heads.dim)
        for window, heads in zip(windows, kv_heads, strict=True)
    }
    largest = max(kv_heads, key=lambda heads: heads.dim)
    bias = fields.flag("attention_bias", False)
    shared = fields.count("num_kv_shared_layers", 0)
    own, inner = max(0, len(windows) - shared), fields.positive_int("intermediate_size")
    wide = 2 * inner if fields.flag("use_double_wide_mlp", False) else inner
    _check_shared(fields, windows, own)
    return read_decoder(
        fields.updated(num_key_value_heads=largest.num, head_dim=largest.dim),
        architecture,
        norm=NormHParams(
            eps=fields.number("rms_norm_eps", 1e-6), placement="sandwich", float32=True
        ),
        windows=windows,
        rope=ropes[windows[-1] is None],
        layer_ropes=tuple(ropes[window is None] for window in windows),
        layer_kv_heads=kv_heads,
        num_kv_shared_layers=shared,
        layer_intermediate_sizes=(inner,) * own + (wide,) * shared,
        activation=activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        max_positions=fields.positive_int("max_position_embeddings"),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        value_norm=True,
        keys_are_values=fields.flag("attention_k_eq_v", False),
        attention_scale=1.0,
        embedding_scale=fields.positive_int("hidden_size") ** 0.5,
        logit_soft_cap=fields.number_or_none("final_logit_softcapping"),
        layer_scales=True,
        per_layer_inputs=_per_layer_inputs(fields),
        moe=_moe(fields, len(windows)),
    )


def _refuse(fields: Fields) -> None:
    if fields.text("use_bidirectional_attention", None) == "all":
        raise UnsupportedError(
            f"{fields.source}: use_bidirectional_attention is 'all': this is an embedding model, which "
            "does not generate text."
        )


def _windows(fields: Fields) -> tuple[int | None, ...]:
    window, layers = fields.positive_int("sliding_window"), fields.positive_int("num_hidden_layers")
    found = layer_windows(fields, window)
    windows = found or tuple(window if (layer + 1) % 6 else None for layer in range(layers))
    return (*windows[:-1], None)  # the last layer always attends to all tokens


def _kv_heads(fields: Fields, windows: Sequence[int | None]) -> tuple[KVHeads, ...]:
    """The KV heads of each layer; older configs have common fields for the layers without a window."""
    dim, num = fields.positive_int("head_dim", 256), fields.positive_int("num_key_value_heads")
    overrides = {
        "head_dim": fields.positive_int("global_head_dim", _GLOBAL_HEAD_DIM),
        "num_key_value_heads": num,
    }
    if fields.flag("attention_k_eq_v", False):
        overrides["num_key_value_heads"] = fields.positive_int("num_global_key_value_heads", num)
    per_layer = fields.mapping("per_layer_config")
    if "per_layer_config" not in fields:
        full = [str(layer) for layer, window in enumerate(windows) if window is None]
        per_layer = dict.fromkeys(full, overrides)
    settings, found = Fields(per_layer, f"{fields.source} (per_layer_config)"), []
    for layer in range(len(windows)):
        given = settings.mapping(str(layer))
        own = Fields(given, f"{fields.source} (per_layer_config {layer})")
        if others := sorted(given.keys() - overrides.keys()):
            raise UnsupportedError(
                f"{own.source}: {', '.join(others)} cannot differ between layers, only "
                f"{' and '.join(overrides)}."
            )
        heads = own.positive_int("num_key_value_heads", num)
        if fields.positive_int("num_attention_heads") % heads:
            raise CheckpointError(
                f"{own.source}: num_key_value_heads is {heads}, which does not divide "
                f"num_attention_heads ({fields.positive_int('num_attention_heads')})."
            )
        found.append(KVHeads(num=heads, dim=own.positive_int("head_dim", dim)))
    for slides in (True, False):
        kinds = {
            heads
            for heads, window in zip(found, windows, strict=True)
            if (window is not None) is slides
        }
        if len(kinds) > 1:
            raise UnsupportedError(
                f"{fields.source}: layers of the same type have different heads ({kinds}), which is not "
                "supported."
            )
    return tuple(found)


def _rope(fields: Fields, window: int | None, dim: int) -> RopeConfig:
    kind = "full_attention" if window is None else "sliding_attention"
    ropes = fields.mapping("rope_parameters")
    if "rope_theta" in ropes:  # a GGUF has those of the layers without a window
        ropes = {"full_attention": ropes, "sliding_attention": fields.mapping("rope_in_windows")}
    given = {
        "max_position_embeddings": fields.positive_int("max_position_embeddings"),
        "rope_parameters": ropes.get(kind, _ROPES[kind]),
    }
    return RopeConfig.from_hf(Fields(given, fields.source), dim)


def _check_shared(fields: Fields, windows: Sequence[int | None], own: int) -> None:
    """The layers behind the first `own`, which share keys and values, need one of their type before them."""
    before, after = ({window is None for window in part} for part in (windows[:own], windows[own:]))
    if not after <= before:
        shared = fields.count("num_kv_shared_layers", 0)
        raise CheckpointError(
            f"{fields.source}: num_kv_shared_layers is {shared} of {len(windows)} layers, and a layer of "
            "the same type, whose keys and values they read, is not among the others."
        )


def _moe(fields: Fields, layers: int) -> MoEHParams | None:
    if not fields.flag("enable_moe_block", False):
        return None
    return MoEHParams(
        routing=read_routing(fields, "top_k_experts", normalised=True),
        intermediate_size=fields.positive_int("moe_intermediate_size"),
        layers=(True,) * layers,
        activation=ExpertActivation(kind="gelu_tanh"),
        beside_dense=True,
    )


def _per_layer_inputs(fields: Fields) -> PerLayerInputs | None:
    size = fields.count("hidden_size_per_layer_input", 256)
    if not size:
        return None
    vocab = fields.positive_int("vocab_size_per_layer_input", 262_144)
    kind = activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    return PerLayerInputs(vocab_size=vocab, size=size, activation=kind)


def _in_network(name: str) -> str:
    """The network's name of a module, or an expression for such names."""
    for old, new in {**_PER_LAYER, **_PER_LAYER_OUTER}.items():
        name = name.replace(old, new)
    return name


def _gemma4_with_images(fields: Fields, architecture: str) -> HParams:
    return _gemma4(text_fields(fields), architecture)


def _rules(hparams: HParams) -> Sequence[Rule]:
    layer = r"(model\.layers\.\d+)"
    return [
        *_key_rules(hparams),
        *(
            Rule(pattern=rf"{layer}\.{old}\.(\w+)", name=rf"\1.{new}.\2")
            for old, new in _PER_LAYER.items()
        ),
        *(
            Rule(pattern=rf"model\.{old}\.(\w+)", name=rf"model.{new}.\1")
            for old, new in _PER_LAYER_OUTER.items()
        ),
        *_expert_rules(hparams),
    ]


def _expert_rules(hparams: HParams) -> Iterator[Rule]:
    if hparams.moe is None:
        return
    layer, count = r"(model\.layers\.\d+)", hparams.moe.routing.num_experts
    for old, new in _EXPERTS.items():
        yield Rule(pattern=rf"{layer}\.{old}", name=rf"\1.moe.{new}")
    inner = hparams.moe.intermediate_size
    parts = {"gate_proj": (0, inner), "up_proj": (inner, 2 * inner)}
    for part, rows in parts.items():
        yield from stacked_expert_rules(
            rf"{layer}\.experts\.gate_up_proj",
            rf"\1.moe.experts.{{expert}}.{part}.weight",
            count,
            2 * inner,
            rows,
        )
    yield from stacked_expert_rules(
        rf"{layer}\.experts\.down_proj",
        r"\1.moe.experts.{expert}.down_proj.weight",
        count,
        hparams.hidden_size,
    )


def _key_rules(hparams: HParams) -> Iterator[Rule]:
    """Rules for the layers that have no keys and values of their own, or the same projection for both."""
    for index, window in enumerate(hparams.sliding_windows):
        attention = rf"(model\.layers\.{index}\.self_attn)"
        if hparams.kv_layer_of(index) != index:  # some files have unused weights
            yield Rule(pattern=rf"{attention}\.[kv]_(?:proj|norm)\..*", name="")
        elif hparams.keys_are_values and window is None:
            for part in "kv":
                yield Rule(pattern=rf"{attention}\.k_proj\.(\w+)", name=rf"\1.{part}_proj.\2")


def _outer_rules(hparams: HParams) -> Sequence[Rule]:
    """Drop the vision and audio parts, and the prefix before the text model's names."""
    del hparams
    other = "vision_tower|audio_tower|embed_vision|embed_audio|vision_model|audio_model"
    return [
        Rule(pattern=rf"(?:.*\.)?(?:{other})\..*", name=""),
        Rule(pattern=r"(?:language_model\.model|model\.language_model)\.(.*)", name=r"model.\1"),
        Rule(pattern=r"language_model\.(lm_head\..*)", name=r"\1"),
    ]


def _gguf_config(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    layers = keys.positive_int("block_count")
    slides = keys.sequence("attention.sliding_window_pattern")
    if slides is None or len(slides) != layers:
        raise CheckpointError(
            f"{header.path}: attention.sliding_window_pattern has {len(slides or ())} entries for {layers} "
            "layers."
        )
    full = [layer for layer, each in enumerate(slides) if not each]
    heads = _per_layer(keys, header, "attention.head_count_kv")
    inner = _per_layer(keys, header, "feed_forward_length")
    table = header.tensors.get("per_layer_token_embd.weight")
    return {
        **keys.renamed(_GGUF_FIELDS),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
        "num_key_value_heads": next((heads[i] for i in range(layers) if slides[i]), heads[0]),
        "per_layer_config": {
            str(layer): {
                "head_dim": keys.positive_int("attention.key_length"),
                "num_key_value_heads": heads[layer],
            }
            for layer in full
        },
        "rope_in_windows": {"rope_theta": keys.number("rope.freq_base_swa", 10_000.0)},
        "attention_k_eq_v": bool(full) and f"blk.{full[0]}.attn_v.weight" not in header.tensors,
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] == 2 * inner[0],
        "hidden_size_per_layer_input": 0
        if table is None
        else keys.positive_int("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": None if table is None else table.shape[0],
        "enable_moe_block": keys.count("expert_count", 0) > 0,
    }


_GGUF_FIELDS = {
    "attention.key_length_swa": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}


def _per_layer(keys: Fields, header: GGUFHeader, name: str) -> list[int]:
    """A value for each layer; files with equal values store one."""
    value = header.metadata.get(f"gemma4.{name}")
    if isinstance(value, list) and value:
        return value
    return [keys.positive_int(name)] * keys.positive_int("block_count")


def _gguf_rules(hparams: HParams) -> Sequence[Rule]:
    found = [Rule(pattern=r"(.*\.layer_scalar)\.weight", name=r"\1"), *_key_rules(hparams)]
    if hparams.moe is None:
        return found
    inner = hparams.moe.intermediate_size
    for part, rows in {"gate_proj": (0, inner), "up_proj": (inner, 2 * inner)}.items():
        found += stacked_expert_rules(
            r"(.*\.experts)\.gate_up_proj\.weight",
            rf"\1.{{expert}}.{part}.weight",
            hparams.moe.routing.num_experts,
            2 * inner,
            rows,
        )
    return [*found, *gguf_expert_rules(hparams)]


_GGUF = GGUFFamily(
    names={
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "layer_output_scale": "layer_scalar",
        "inp_gate": "per_layer.input_gate",
        "proj": "per_layer.projection",
        "post_norm": "per_layer.norm",
        "ffn_gate_inp": "moe.gate",
        "ffn_gate_inp.scale": "moe.router_norm.weight",
        "pre_ffw_norm_2": "moe.input_norm",
        "post_ffw_norm_1": "moe.dense_norm",
        "post_ffw_norm_2": "moe.output_norm",
        "ffn_gate_exps": "moe.experts.gate_proj",
        "ffn_up_exps": "moe.experts.up_proj",
        "ffn_gate_up_exps": "moe.experts.gate_up_proj",
        "ffn_down_exps": "moe.experts.down_proj",
        "ffn_down_exps.scale": "moe.experts.per_expert_scale",
    },
    outer_names={
        "per_layer_token_embd": "model.per_layer.embed_tokens",
        "per_layer_model_proj": "model.per_layer.projection",
        "per_layer_proj_norm": "model.per_layer.norm",
    },
    config=_gguf_config,
    rules=_gguf_rules,
    layer_lists=("attention.head_count_kv", "feed_forward_length"),
)
GEMMA4 = Family(model_type="gemma4_text", read=_gemma4, rules=_rules, gguf=_GGUF)
GEMMA4_WITH_IMAGES = Family(
    model_type="gemma4",
    read=_gemma4_with_images,
    outer_rules=_outer_rules,
    rules=_rules,
    gguf=_GGUF,
)
