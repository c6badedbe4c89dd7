"""Gemma 1, 2 and 3 (text): norms times 1 + w, a GELU gate, scaled embeddings.

Gemma 2 and 3 normalise the inputs and outputs of attention and MLP, and most layers have a sliding
window. Gemma 2 soft-caps scores and logits; Gemma 3 normalises q and k, and the layers with a window
have a RoPE of their own. Checkpoints with a vision part load without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from windlass.errors import UnsupportedError
from windlass.models.families.base import (
    Family,
    GGUFFamily,
    activation,
    layer_windows,
    read_decoder,
)
from windlass.models.families.with_images import text_fields
from windlass.models.fields import Fields
from windlass.models.gguf_header import GGUFHeader
from windlass.models.hparams import HParams, NormHParams, NormPlacement
from windlass.models.rope_config import RopeConfig
from windlass.models.tensor_rules import Rule

_HEAD_DIM = 256
# Fields that published configs of Gemma 3 leave out, with the values of the 4B model.
_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
# The models whose scores are not scaled by head_dim ** -0.5, by their number of layers: the 27B ones.
# GGUF files do not store query_pre_attn_scalar; there it is hidden_size / heads.
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62


def _gemma1(fields: Fields, architecture: str) -> HParams:
    # Old configs say "gelu" and mean the approximation.
    tanh = fields.text("hidden_act", "gelu") == "gelu"
    kind = "gelu_tanh" if tanh else activation(fields)
    return _read(fields, architecture, placement="pre", activation=kind)


def _gemma2(fields: Fields, architecture: str) -> HParams:
    return _read(
        fields,
        architecture,
        placement="sandwich",
        windows=_windows(fields, pattern=2),
        activation=activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_soft_cap=fields.number_or_none("attn_logit_softcapping"),
        logit_soft_cap=fields.number_or_none("final_logit_softcapping"),
    )


def _gemma3(fields: Fields, architecture: str) -> HParams:
    fields = fields.with_defaults(_GEMMA3_DEFAULTS)
    windows = _windows(fields, pattern=6)
    everywhere, in_windows = _ropes(fields, fields.positive_int("head_dim", _HEAD_DIM))
    return _read(
        fields,
        architecture,
        placement="sandwich",
        windows=windows,
        rope=everywhere,
        layer_ropes=tuple(everywhere if window is None else in_windows for window in windows),
        # The scaling of RoPE is part of the stated context length.
        max_positions=fields.positive_int("max_position_embeddings"),
        activation=activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        qk_norm="head",
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_soft_cap=fields.number_or_none("attn_logit_softcapping"),
        logit_soft_cap=fields.number_or_none("final_logit_softcapping"),
    )


def _gemma3_with_images(fields: Fields, architecture: str) -> HParams:
    return _gemma3(text_fields(fields), architecture)


def _read(fields: Fields, architecture: str, *, placement: NormPlacement, **known: Any) -> HParams:
    """Read what the generations share."""
    if fields.flag("use_bidirectional_attention", False):
        raise UnsupportedError(
            f"{fields.source}: use_bidirectional_attention is set: this is an embedding model, which "
            "does not generate text."
        )
    bias = fields.flag("attention_bias", False)
    return read_decoder(
        fields,
        architecture,
        head_dim=_HEAD_DIM,
        norm=NormHParams(
            eps=fields.number("rms_norm_eps", 1e-6), placement=placement, float32=True
        ),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        o_bias=bias,
        embedding_scale=fields.positive_int("hidden_size") ** 0.5,
        **known,
    )


def _windows(fields: Fields, pattern: int) -> tuple[int | None, ...]:
    """The layers' windows. Without layer_types, every `pattern`th layer has none."""
    window = fields.positive_int("sliding_window", 4096)
    found = layer_windows(fields, window)
    if found is not None:
        return found
    period = fields.positive_int("sliding_window_pattern", pattern)
    layers = range(fields.positive_int("num_hidden_layers"))
    return tuple(window if (layer + 1) % period else None for layer in layers)


def _ropes(fields: Fields, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """The RoPE of the layers without and with a window; scaling applies to the former only."""
    everywhere = RopeConfig.from_hf(
        fields, head_dim, layer_type="full_attention", default_theta=1_000_000.0
    )
    in_windows = {
        "max_position_embeddings": fields.positive_int("max_position_embeddings"),
        "rope_theta": fields.number("rope_local_base_freq", 10_000.0),
        "rope_parameters": fields.mapping("rope_parameters").get("sliding_attention"),
    }
    return everywhere, RopeConfig.from_hf(Fields(in_windows, fields.source), head_dim)


def _rules(hparams: HParams) -> Sequence[Rule]:
    """The rules for safetensors; those with a vision part have a prefix before the decoder's names."""
    del hparams
    return (
        Rule(pattern=r"(?:.*\.)?(?:vision_tower|multi_modal_projector)\..*", name=""),
        Rule(
            pattern=r"(?:language_model\.)?model\.(?:language_model\.)?((?:layers\.|norm\.).*norm\.weight|norm\.weight)",
            name=r"model.\1",
            add=1.0,
        ),
        Rule(
            pattern=r"(?:language_model\.model|model\.language_model)\.(.*(?<!norm\.weight))",
            name=r"model.\1",
        ),
        Rule(pattern=r"language_model\.(lm_head\..*)", name=r"\1"),
    )


def _gguf_common(keys: Fields) -> dict[str, Any]:
    soft_caps = keys.renamed(
        {
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        }
    )
    return {"hidden_act": "gelu_pytorch_tanh", **soft_caps}


def _gguf_scalar(keys: Fields, special_layers: int) -> dict[str, Any]:
    if keys.positive_int("block_count") != special_layers:
        head_dim = keys.positive_int("attention.key_length", _HEAD_DIM)
        return {"query_pre_attn_scalar": head_dim}
    heads = keys.positive_int("attention.head_count")
    return {"query_pre_attn_scalar": keys.positive_int("embedding_length") // heads}


def _gguf_windows(keys: Fields) -> dict[str, Any]:
    return keys.renamed(
        {
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": "sliding_window_pattern",
            "rope.freq_base_swa": "rope_local_base_freq",
        }
    )


def _gguf1(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    del header
    return _gguf_common(keys)


def _gguf2(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    del header
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    scalar = _gguf_scalar(keys, _GEMMA2_27B_LAYERS)
    return caps | _gguf_common(keys) | _gguf_windows(keys) | scalar


def _gguf3(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    del header
    keys.positive_int("attention.sliding_window")  # no default: published models differ
    return _gguf_common(keys) | _gguf_windows(keys) | _gguf_scalar(keys, _GEMMA3_27B_LAYERS)


_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA1 = Family(model_type="gemma", read=_gemma1, rules=_rules, gguf=GGUFFamily(config=_gguf1))
GEMMA2 = Family(
    model_type="gemma2",
    read=_gemma2,
    rules=_rules,
    gguf=GGUFFamily(names=_SANDWICH, config=_gguf2),
)
_GGUF3 = GGUFFamily(names=_SANDWICH, config=_gguf3)
GEMMA3 = Family(model_type="gemma3_text", read=_gemma3, rules=_rules, gguf=_GGUF3)
GEMMA3_WITH_IMAGES = Family(
    model_type="gemma3", read=_gemma3_with_images, rules=_rules, gguf=_GGUF3
)
