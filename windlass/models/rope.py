"""RoPE frequencies for each scaling type."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from windlass.models.rope_config import RopeConfig


def frequencies(rope: RopeConfig, max_positions: int) -> tuple[Tensor, float]:
    """Inverse frequencies [dim / 2], and a scale for cos and sin.

    `max_positions`: of the longest context. It selects the factors of longrope for all contexts, since
    cached keys cannot change their rotation when a context grows.
    """
    exponent = torch.arange(0, rope.dim, 2, dtype=torch.float32, device="cpu") / rope.dim
    base = 1.0 / rope.theta**exponent
    if rope.rope_factors is not None:
        return base / torch.tensor(rope.rope_factors, device="cpu"), 1.0
    if rope.kind == "proportional":
        base[int(rope.proportion * rope.dim) // 2 :] = 0.0
    if rope.kind in ("linear", "proportional"):
        return base / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(base, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(base, rope), _yarn_scale(rope)
    if rope.kind == "longrope":
        is_long = max_positions > rope.original_max_positions
        factors = rope.long_factors if is_long else rope.short_factors
        scale = rope.long_mscale if is_long else rope.short_mscale
        scale = _longrope_scale(rope) if scale is None else scale
        return base / torch.tensor(factors, device="cpu"), scale
    # "dynamic" differs only beyond the trained context, which RopeConfig.max_context excludes.
    return base, 1.0


def _llama3(base: Tensor, rope: RopeConfig) -> Tensor:
    """Low frequencies are divided by the factor, high ones kept, and those between interpolated."""
    assert rope.low_freq_factor is not None
    assert rope.high_freq_factor is not None
    turns = rope.original_max_positions * base / (2 * math.pi)  # rotations over the trained context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return base / rope.factor * (1 - blend) + base * blend


def _yarn(base: Tensor, rope: RopeConfig) -> Tensor:
    """High-frequency dimensions are kept, low ones interpolated, with a linear ramp between."""

    def dimension_for(turns: float) -> float:
        span = rope.original_max_positions / (turns * 2 * math.pi)
        return rope.dim * math.log(span) / (2 * math.log(rope.theta))

    low, high = dimension_for(rope.beta_fast), dimension_for(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    index = torch.arange(rope.dim // 2, dtype=torch.float32, device="cpu")
    interpolated = ((index - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return base / rope.factor * interpolated + base * (1 - interpolated)


def _longrope_scale(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_positions))


def _yarn_scale(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
