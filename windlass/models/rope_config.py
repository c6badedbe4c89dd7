"""Rotary positions as a checkpoint describes them; the frequencies are computed elsewhere.

Knows the old spelling (rope_theta beside rope_scaling) and that of transformers 5 (rope_parameters).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

from windlass.errors import CheckpointError, UnsupportedError
from windlass.models.fields import Fields

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Everything that the inverse frequencies depend on. None: the kind's own rule applies."""

    theta: float
    dim: int  # the first `dim` of a head's features turn; the rest stay as they are
    original_max_positions: int  # the context before scaling
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    attention_factor: float | None = None  # yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    # llama.cpp stores llama3 scaling as one divisor for each of the dim / 2 frequencies.
    rope_factors: tuple[float, ...] | None = None

    @classmethod
    def from_hf(cls, config: Fields, head_dim: int) -> RopeConfig:
        """Read what a config.json says about positions."""
        rope = _joined(config)
        kind = rope.text("rope_type", None) or rope.text("type", "default")
        if kind not in get_args(RopeKind):
            raise UnsupportedError(
                f"{rope.source}: rope type {kind!r} is not known. "
                f"Known: {', '.join(get_args(RopeKind))}."
            )
        original = rope.whole(
            "original_max_position_embeddings", config.whole("max_position_embeddings")
        )
        dim = int(head_dim * rope.number("partial_rotary_factor", 1.0))
        if dim % 2 or not 0 < dim <= head_dim:
            raise CheckpointError(
                f"{config.source}: {dim} of {head_dim} features per head are rotary; "
                "expected an even number between 2 and the head's size."
            )
        return cls(
            theta=rope.number("rope_theta", 10000.0),
            dim=dim,
            original_max_positions=original,
            kind=cast(RopeKind, kind),
            factor=1.0 if kind == "default" else rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor") if kind == "llama3" else None,
            high_freq_factor=rope.number("high_freq_factor") if kind == "llama3" else None,
            attention_factor=rope.number_or_none("attention_factor"),
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            mscale=rope.number_or_none("mscale"),
            mscale_all_dim=rope.number_or_none("mscale_all_dim"),
            truncate=rope.flag("truncate", True),
            rope_factors=_factors(rope, dim),
        )

    def longest_context(self, max_positions: int) -> int:
        """How long a context may be: stretched kinds reach further than they were trained.

        Not "dynamic": its frequencies change with the length of the text, which would invalidate
        every cached key, so such a model is served up to the length that it was trained for.
        """
        if self.kind == "yarn":
            return max(max_positions, int(self.original_max_positions * self.factor))
        if self.kind == "linear":
            return int(max_positions * self.factor)
        return max_positions


def _joined(config: Fields) -> Fields:
    """One object out of the places that describe positions; the more specific place wins."""
    joined = config.present(
        "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"
    )
    newer, older = config.mapping("rope_parameters"), config.mapping("rope_scaling")
    if "type" in older or "rope_type" in older:
        newer = {key: value for key, value in newer.items() if key not in ("type", "rope_type")}
    joined |= {**newer, **older}
    nested = [key for key, value in joined.items() if isinstance(value, dict)]
    if nested:
        raise UnsupportedError(
            f"{config.source}: positions differ by kind of layer ({', '.join(nested)}), "
            "which this version does not know."
        )
    return Fields(joined, f"{config.source} (rope)")


def _factors(rope: Fields, dim: int) -> tuple[float, ...] | None:
    factors = rope.sequence("rope_factors")
    if factors is None:
        return None
    if len(factors) != dim // 2:
        raise CheckpointError(
            f"{rope.source}: {len(factors)} rope factors for {dim // 2} frequencies."
        )
    return tuple(float(factor) for factor in factors)
