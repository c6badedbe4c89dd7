"""Options of attention and RoPE in which model families differ; every backend takes these types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How scores become weights."""

    scale: float
    window: int | None = None  # the number of keys that a query sees, itself included; None: all
    soft_cap: float | None = None  # scores become cap * tanh(score / cap)
    sinks: Tensor | None = None  # float32 [query heads]: a logit that only adds to the denominator
    # A query sees the keys of its own chunk instead: positions [i * window, (i + 1) * window).
    chunked: bool = False

    def first_visible(self, position: int) -> int:
        """The first position that a query sees; queries after it see no earlier one."""
        if self.window is None:
            return 0
        if self.chunked:
            return position - position % self.window
        return max(0, position - self.window + 1)


@dataclass(frozen=True, slots=True)
class QKNorms:
    """Norms of each head of q and k before the rotation.

    Weights are [dim], shared by the heads, or [heads, dim]. `layer` is LayerNorm without a bias.
    """

    q: Tensor
    k: Tensor
    eps: float
    kind: Literal["rms", "layer"] = "rms"

    @property
    def per_head(self) -> bool:
        """Whether every head has its own weight."""
        return self.q.ndim > 1


@dataclass(frozen=True, slots=True)
class RopeOptions:
    """How q and k are normalised and rotated before attention."""

    # float32 [positions, rotated]: cos, then sin. Dimensions from `rotated` on are unchanged. None: no
    # rotation.
    cos_sin: Tensor | None
    interleaved: bool = False  # rotate the pairs (2i, 2i + 1), not (i, i + rotated / 2)
    norms: QKNorms | None = None

    @property
    def rotated(self) -> int:
        """Dimensions of a head that are rotated."""
        return 0 if self.cos_sin is None else self.cos_sin.shape[1]
