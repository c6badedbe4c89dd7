"""RoPE parameters of a checkpoint; rope.py computes the frequencies.

Reads the old fields (rope_theta and rope_scaling) and those of transformers 5 (rope_parameters).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

from windlass.errors import CheckpointError, UnsupportedError
from windlass.models.fields import Fields

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """All parameters of the inverse frequencies. None: the default of the RoPE type."""

    theta: float
    dim: int  # the first `dim` features of a head are rotated
    original_max_positions: int  # the context length before scaling
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    attention_factor: float | None = None  # yarn, longrope
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    proportion: float = (
        1.0  # proportional: the share of the pairs that rotate, those of high frequency
    )
    # llama.cpp stores llama3 scaling as one divisor per frequency, dim / 2 in total.
    rope_factors: tuple[float, ...] | None = None
    # longrope: divisors for contexts of up to original_max_positions, and for longer ones
    short_factors: tuple[float, ...] | None = None
    long_factors: tuple[float, ...] | None = None
    # longrope of Phi-MoE: the scales of cos and sin with these factors, instead of attention_factor
    short_mscale: float | None = None
    long_mscale: float | None = None
    # Ministral 3: scores of a query at position p are multiplied by 1 + beta * log(1 + floor(p /
    # original_max_positions)).
    score_beta: float | None = None

    @classmethod
    def from_hf(
        cls,
        config: Fields,
        head_dim: int,
        *,
        layer_type: str | None = None,
        default_theta: float = 10000.0,
    ) -> RopeConfig:
        """Read the RoPE fields of a config.json; those of `layer_type` if they differ by layer type."""
        rope = _merged_fields(config, layer_type)
        kind = rope.text("rope_type", None) or rope.text("type", "default")
        if kind not in get_args(RopeKind):
            raise UnsupportedError(
                f"{rope.source}: rope type {kind!r} is not supported. "
                f"Supported: {', '.join(get_args(RopeKind))}."
            )
        original = rope.positive_int(
            "original_max_position_embeddings", config.positive_int("max_position_embeddings")
        )
        proportion = rope.number("partial_rotary_factor", 1.0)
        is_proportional = kind == "proportional"
        dim = head_dim if is_proportional else int(head_dim * proportion)
        if dim % 2 or not 0 < dim <= head_dim:
            raise CheckpointError(
                f"{config.source}: {dim} of {head_dim} features per head are rotary; "
                "expected an even number between 2 and the head size."
            )
        return cls(
            theta=rope.number("rope_theta", default_theta),
            dim=dim,
            original_max_positions=original,
            kind=cast(RopeKind, kind),
            factor=_factor(cast(RopeKind, kind), rope, config, original),
            low_freq_factor=rope.number("low_freq_factor") if kind == "llama3" else None,
            high_freq_factor=rope.number("high_freq_factor") if kind == "llama3" else None,
            attention_factor=rope.number_or_none("attention_factor"),
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            mscale=rope.number_or_none("mscale"),
            mscale_all_dim=rope.number_or_none("mscale_all_dim"),
            truncate=rope.flag("truncate", True),
            proportion=proportion if is_proportional else 1.0,
            rope_factors=_factors(rope, "rope_factors", dim),
            short_factors=_factors(rope, "short_factor", dim, required=kind == "longrope"),
            long_factors=_factors(rope, "long_factor", dim, required=kind == "longrope"),
            short_mscale=rope.number_or_none("short_mscale"),
            long_mscale=rope.number_or_none("long_mscale"),
            score_beta=rope.number_or_none("llama_4_scaling_beta"),
        )

    def max_context(self, max_positions: int) -> int:
        """The maximum context length; yarn and linear scaling extend the trained length.

        "dynamic" scaling is limited to the trained length: its frequencies depend on the sequence
        length, which would invalidate every cached key.
        """
        if self.kind == "yarn":
            return max(max_positions, int(self.original_max_positions * self.factor))
        if self.kind == "linear":
            return int(max_positions * self.factor)
        return max_positions


def _merged_fields(config: Fields, layer_type: str | None) -> Fields:
    """Merge all RoPE fields into one object; more specific fields take precedence."""
    merged = config.present(
        "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"
    )
    newer, older = config.mapping("rope_parameters"), config.mapping("rope_scaling")
    if layer_type is not None and layer_type in newer:
        newer = newer[layer_type]
    if "type" in older or "rope_type" in older:
        newer = {key: value for key, value in newer.items() if key not in ("type", "rope_type")}
    merged |= {**newer, **older}
    nested = [key for key, value in merged.items() if isinstance(value, dict)]
    if nested:
        raise UnsupportedError(
            f"{config.source}: RoPE parameters differ by layer type ({', '.join(nested)}), "
            "which is not supported."
        )
    return Fields(merged, f"{config.source} (rope)")


def _factor(kind: RopeKind, rope: Fields, config: Fields, original: int) -> float:
    if kind == "default":
        return 1.0
    if kind == "proportional":
        return rope.number("factor", 1.0)
    if kind == "longrope":
        return rope.number("factor", config.positive_int("max_position_embeddings") / original)
    return rope.number("factor")


def _factors(rope: Fields, name: str, dim: int, required: bool = False) -> tuple[float, ...] | None:
    """A divisor for each frequency."""
    factors = rope.sequence(name)
    if factors is None and not required:
        return None
    if factors is None or len(factors) != dim // 2:
        raise CheckpointError(
            f"{rope.source}: {name} has {len(factors or ())} factors for {dim // 2} frequencies."
        )
    return tuple(float(factor) for factor in factors)
