"""Qwen 2 and 2.5 (a bias of q, k and v) and Qwen 3 (norms of q and k), dense and mixtures of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from windlass.core.moe import Routing
from windlass.errors import CheckpointError
from windlass.models.families.base import Family, GGUFFamily, layer_windows, read_decoder
from windlass.models.families.moe import (
    EXPERT_NAMES,
    SHARED_NAMES,
    gguf_expert_rules,
    gguf_experts,
    read_routing,
)
from windlass.models.fields import Fields
from windlass.models.gguf_header import GGUFHeader
from windlass.models.hparams import HParams, MoEHParams


def _windows(fields: Fields) -> tuple[int | None, ...]:
    layers = fields.positive_int("num_hidden_layers")
    if not fields.flag("use_sliding_window", False):
        return (None,) * layers
    window = fields.positive_int_or_none("sliding_window", 4096)
    if window is None:
        return (None,) * layers
    found = layer_windows(fields, window)
    if found is not None:
        return found
    first = fields.count("max_window_layers", 28)
    return tuple(window if layer >= first else None for layer in range(layers))


def _without_chunks(fields: Fields, hparams: HParams) -> HParams:
    """Contexts end where dual chunk attention (Qwen 2.5 1M) begins to change positions."""
    chunks = fields.mapping("dual_chunk_attention_config")
    if not chunks:
        return hparams
    found = Fields(chunks, f"{fields.source} (dual_chunk_attention_config)")
    name = "original_max_position_embeddings"
    limit = found.positive_int(name, found.positive_int("chunk_size", 262_144))
    return replace(hparams, max_positions=min(hparams.max_positions, limit))


def _qwen2(fields: Fields, architecture: str) -> HParams:
    hparams = read_decoder(fields, architecture, windows=_windows(fields), qkv_bias=True)
    return _without_chunks(fields, hparams)


def _qwen3(fields: Fields, architecture: str) -> HParams:
    bias = fields.flag("attention_bias", False)
    hparams = read_decoder(
        fields,
        architecture,
        head_dim=128,
        windows=_windows(fields),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
    )
    return _without_chunks(fields, hparams)


def _moe_layers(fields: Fields) -> tuple[bool, ...]:
    """Every `decoder_sparse_step`th layer but those of mlp_only_layers."""
    layers = fields.positive_int("num_hidden_layers")
    step = fields.positive_int("decoder_sparse_step", 1)
    dense = set(fields.sequence("mlp_only_layers") or ())
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def _routing(fields: Fields, normalised: bool = False) -> Routing:
    """`normalised`: the default."""
    return read_routing(fields, normalised=fields.flag("norm_topk_prob", normalised))


def with_shared_expert(fields: Fields, dense: HParams, normalised: bool = False) -> HParams:
    """The model with mixtures of experts, and an expert with a gate that every token uses."""
    moe = MoEHParams(
        routing=_routing(fields, normalised),
        intermediate_size=fields.positive_int("moe_intermediate_size"),
        layers=_moe_layers(fields),
        shared_intermediate_size=fields.positive_int("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return replace(dense, moe=moe)


def _qwen2_moe(fields: Fields, architecture: str) -> HParams:
    dense = with_shared_expert(fields, _qwen2(fields, architecture))
    return replace(dense, qkv_bias=fields.flag("qkv_bias", True))


def _qwen3_moe(fields: Fields, architecture: str) -> HParams:
    # Its own default head size, hidden_size / num_attention_heads, does not fit any published model.
    dense = _qwen3(fields, architecture)
    moe = MoEHParams(
        routing=_routing(fields),
        intermediate_size=fields.positive_int("moe_intermediate_size"),
        layers=_moe_layers(fields),
    )
    return replace(dense, moe=moe)


def _no_gguf_window(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    """Files of Qwen do not store which layers have the window."""
    window = keys.count("attention.sliding_window", 0)
    if window:
        raise CheckpointError(
            f"{header.path}: a sliding window of {window} is not supported for Qwen, since the file "
            "does not say which layers have it."
        )
    return {}


def _gguf_moe(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    return _no_gguf_window(keys, header) | gguf_experts(keys, norm_topk_prob=True)


def _gguf_shared(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    shared = keys.positive_int("expert_shared_feed_forward_length")
    found = _no_gguf_window(keys, header) | gguf_experts(keys, norm_topk_prob=False)
    return found | {"shared_expert_intermediate_size": shared}


GGUF_SHARED_NAMES = {"ffn_gate_inp_shexp": "mlp.shared_expert_gate", **SHARED_NAMES}
QWEN2 = Family(model_type="qwen2", read=_qwen2, gguf=GGUFFamily(config=_no_gguf_window))
QWEN3 = Family(model_type="qwen3", read=_qwen3, gguf=GGUFFamily(config=_no_gguf_window))
QWEN2_MOE = Family(
    model_type="qwen2_moe",
    read=_qwen2_moe,
    gguf=GGUFFamily(
        names={**EXPERT_NAMES, **GGUF_SHARED_NAMES}, config=_gguf_shared, rules=gguf_expert_rules
    ),
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    read=_qwen3_moe,
    gguf=GGUFFamily(names=EXPERT_NAMES, config=_gguf_moe, rules=gguf_expert_rules),
)
