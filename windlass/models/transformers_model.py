"""A model of transformers as its probe found it; plain values, made by transformers_probe.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """What one layer asks its attention function for."""

    num_q: int
    num_kv: int
    dim: int
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersModel:
    """A causal LM of transformers: its config, its attention layers, and the paths of its modules."""

    class_name: str  # "BloomForCausalLM"
    config: Mapping[str, Any]  # of config.json, without its quantization_config
    layers: tuple[LayerAttention, ...]
    body: str  # computes hidden states: "model"
    blocks: str | None  # the list of decoder layers; None: there is no such list
    table: str  # the token embedding
    head: str
    tied: bool
    vocab_size: int
    hidden_size: int
