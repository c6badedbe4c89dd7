"""Hyper-parameters of multi-head latent attention that kernels and config readers share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentHeads:
    """Query heads of an MLA layer, which share one latent vector per token.

    A query has `nope_dim` features without and `rope_dim` features with positions. A latent vector has
    `rank` features, from which each head's keys and values are projected, and a rotated key.
    """

    num_q: int
    nope_dim: int
    rope_dim: int
    rank: int
    value_dim: int
    interleaved: bool = True  # whether RoPE rotates the pairs (2 i, 2 i + 1), not (i, i + dim / 2)

    @property
    def dim(self) -> int:
        """Numbers of a latent vector, and of an absorbed query."""
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim
