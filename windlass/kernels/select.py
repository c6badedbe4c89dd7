"""Chooses a kernel for each operation once, when the engine is built, and keeps the reasons.

Candidates stand in order of preference; each says why it refuses. The plain version is last and
never refuses. A new kernel is one file and one line here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from windlass.kernels import reference, torch_attention


@dataclass(frozen=True, slots=True)
class Need:
    """What a layer asks of a kernel."""

    device: torch.device
    dtype: torch.dtype
    soft_cap: float | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel and its reason to refuse, None when it accepts."""

    name: str
    function: Callable[..., Any]
    refuse: Callable[[Need], str | None]


@dataclass(frozen=True, slots=True)
class Selection:
    """The kernel that was chosen, and why those before it were not."""

    operation: str
    name: str
    function: Callable[..., Any]
    refusals: dict[str, str] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        if not self.refusals:
            return "first choice"
        return "; ".join(f"{name}: {why}" for name, why in self.refusals.items())


def _never(need: Need) -> str | None:  # noqa: ARG001
    return None


def _no_soft_cap(need: Need) -> str | None:
    return "no soft cap in torch's fused product" if need.soft_cap is not None else None


_CANDIDATES: dict[str, list[Candidate]] = {
    "attention": [
        Candidate("torch", torch_attention.attention, _no_soft_cap),
        Candidate("reference", reference.attention, _never),
    ],
}


def select(operation: str, need: Need) -> Selection:
    """The first candidate that accepts."""
    refusals: dict[str, str] = {}
    for candidate in _CANDIDATES[operation]:
        why = candidate.refuse(need)
        if why is None:
            return Selection(operation, candidate.name, candidate.function, refusals)
        refusals[candidate.name] = why
    raise AssertionError(f"the plain version of {operation} refused: {refusals}")
