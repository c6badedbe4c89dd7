"""Llama 4 Scout and Maverick (text): chunked attention, layers without RoPE, experts with scaled inputs.

Layers with RoPE attend to the chunk of the token; the others to all tokens, with scores that grow with
the position. Their norm of q and k comes after the rotation, which keeps lengths: it equals one before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from windlass.errors import UnsupportedError
from windlass.models.families.base import (
    Family,
    GGUFFamily,
    layer_windows,
    read_decoder,
    rotating_layers,
)
from windlass.models.families.moe import (
    EXPERT_NAMES,
    SHARED_NAMES,
    gguf_expert_rules,
    read_routing,
)
from windlass.models.families.with_images import rename_modules, text_fields, text_rules
from windlass.models.fields import Fields
from windlass.models.gguf_header import GGUFHeader
from windlass.models.hparams import GrowthHParams, HParams, MoEHParams
from windlass.models.rope_config import RopeConfig
from windlass.models.tensor_rules import Rows, Rule

_DEFAULTS = {
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "num_experts_per_tok": 1,
}
_CHUNK = 8192


def _llama4(fields: Fields, architecture: str) -> HParams:
    fields = fields.with_defaults(_DEFAULTS)
    fields = fields.updated(quantization_config=_in_network(fields.mapping("quantization_config")))
    rotates = rotating_layers(fields)
    rope = _rope(fields)
    bias = fields.flag("attention_bias", False)
    return read_decoder(
        fields,
        architecture,
        rope=rope,
        layer_ropes=tuple(rope if each else None for each in rotates),
        rope_interleaved=True,
        windows=_chunks(fields, rotates),
        chunked_windows=True,
        intermediate_size=fields.positive_int("intermediate_size_mlp", 16_384),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="unit" if fields.flag("use_qk_norm", True) else None,
        unrotated_growth=_growth(fields),
        moe=_moe(fields),
    )


def _rope(fields: Fields) -> RopeConfig:
    rope = RopeConfig.from_hf(fields, fields.positive_int("head_dim"))
    if rope.kind not in ("default", "linear", "llama3"):
        raise UnsupportedError(
            f"{fields.source}: rope type {rope.kind!r} is not supported for Llama 4, since it changes the "
            "lengths of q and k before their norm. Supported: default, linear, llama3."
        )
    return rope


def _chunks(fields: Fields, rotates: Sequence[bool]) -> tuple[int | None, ...]:
    """The chunk length of each layer; None: full attention."""
    chunk = fields.positive_int_or_none("attention_chunk_size", _CHUNK)
    found = layer_windows(fields, chunk, local="chunked_attention")
    return found or tuple(chunk if each else None for each in rotates)


def _growth(fields: Fields) -> GrowthHParams | None:
    name = "attn_temperature_tuning"
    found = fields.present(name).get(name, True)
    if isinstance(found, int):  # a number in the first published configs, where all but 0 mean true
        fields = fields.updated(**{name: bool(found)})
    if not fields.flag(name, True):
        return None
    return GrowthHParams(
        beta=fields.number("attn_scale", 0.1), length=fields.positive_int("floor_scale", _CHUNK)
    )


def _moe(fields: Fields) -> MoEHParams | None:
    layers = _moe_layers(fields)
    if not any(layers):
        return None
    # One expert's weight after normalisation is 1; its score scales its input instead.
    routing = read_routing(fields, normalised=True)
    if routing.top_k != 1:
        raise UnsupportedError(
            f"{fields.source}: num_experts_per_tok is {routing.top_k}; only 1 is supported for Llama 4, "
            "whose experts get inputs scaled by their score."
        )
    inner = fields.positive_int("intermediate_size")
    return MoEHParams(
        routing=routing,
        intermediate_size=inner,
        layers=layers,
        shared_intermediate_size=inner,
        scales_inputs=True,
    )


def _moe_layers(fields: Fields) -> tuple[bool, ...]:
    """The layers in moe_layers; without it every `interleave_moe_layer_step`th."""
    layers = range(fields.positive_int("num_hidden_layers"))
    listed = fields.sequence("moe_layers")
    if listed is not None:
        return tuple(layer in listed for layer in layers)
    step = fields.positive_int("interleave_moe_layer_step", 1)
    return tuple((layer + 1) % step == 0 for layer in layers)


def _in_network(formats: Any) -> Any:
    """The settings of a weight format with the network's names of modules."""
    return rename_modules(formats, lambda name: name.replace("feed_forward", "mlp"))


def _llama4_with_images(fields: Fields, architecture: str) -> HParams:
    return _llama4(text_fields(fields), architecture)


def _rules(hparams: HParams) -> Sequence[Rule]:
    moved = r"(model\.layers\.\d+)\.feed_forward"
    return [
        Rule(pattern=rf"{moved}\.router\.(\w+)", name=r"\1.mlp.gate.\2"),
        Rule(pattern=rf"{moved}\.((?!router\.|experts\.\D).*\.\w+)", name=r"\1.mlp.\2"),
        *([] if hparams.moe is None else _expert_rules(hparams.moe, moved)),
    ]


def _expert_rules(moe: MoEHParams, moved: str) -> Iterator[Rule]:
    """Split the stacks [experts, inputs, outputs], whose names end without `weight`."""
    inner = moe.intermediate_size
    rows = {
        "gate_proj": Rows(0, inner, 2 * inner),
        "up_proj": Rows(inner, 2 * inner, 2 * inner),
        "down_proj": None,
    }
    for expert in range(moe.routing.num_experts):
        for part, taken in rows.items():
            stack = "down_proj" if taken is None else "gate_up_proj"
            yield Rule(
                pattern=rf"{moved}\.experts\.{stack}",
                name=rf"\1.mlp.experts.{expert}.{part}.weight",
                index=expert,
                transposed=True,
                rows=taken,
            )


# llama.cpp's files do not store whether q and k are normalised: Maverick's, with 128 experts, are not.
_MAVERICK_EXPERTS = 128


def _gguf_config(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    if "attention.sliding_window" in keys:
        raise UnsupportedError(
            f"{header.path}: attention.sliding_window is set, as for models of this architecture "
            "without chunks, which are not supported."
        )
    names = {
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "intermediate_size",
        "feed_forward_length": "intermediate_size_mlp",
        "interleave_moe_layer_step": "interleave_moe_layer_step",
    }
    normed = keys.positive_int("expert_count") != _MAVERICK_EXPERTS
    return {**keys.renamed(names), "use_qk_norm": normed}


_GGUF = GGUFFamily(
    names={**EXPERT_NAMES, **SHARED_NAMES}, config=_gguf_config, rules=gguf_expert_rules
)
LLAMA4 = Family(model_type="llama4_text", read=_llama4, rules=_rules, gguf=_GGUF)
LLAMA4_WITH_IMAGES = Family(
    model_type="llama4", read=_llama4_with_images, outer_rules=text_rules, rules=_rules, gguf=_GGUF
)
