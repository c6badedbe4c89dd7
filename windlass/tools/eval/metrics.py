"""Computes perplexity, and the divergence from a reference per token, from logits.

Divergence is KL(reference || model) in nats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_DIGITS = 7


@dataclass(frozen=True, slots=True)
class Comparison:
    """A model compared with its reference over the same tokens."""

    reference_perplexity: float
    ppl_ratio: float
    ppl_ratio_error: float  # one standard error, of the paired difference
    kl_mean: float
    kl_p99: float
    kl_max: float
    agreement: float  # share of positions with the same top-1 token
    rank_shift: float  # mean difference between the two ranks of the next token


@dataclass(frozen=True, slots=True)
class Quality:
    """Measured quality over some tokens."""

    tokens: int
    perplexity: float
    perplexity_error: float  # one standard error
    against: Comparison | None = None

    def row(self, label: str) -> dict[str, Any]:
        values = asdict(self)
        compared = values.pop("against") or {}
        return {"label": label} | {k: _short(v) for k, v in (values | compared).items()}


@dataclass(frozen=True, slots=True)
class Figures:
    """One number per scored token, on the host."""

    nll: NDArray[Any]
    reference_nll: NDArray[Any]
    kl: NDArray[Any]
    agree: NDArray[Any]
    shift: NDArray[Any]


@torch.inference_mode()
def compare(logits: Tensor, targets: Sequence[int], reference: Tensor | None) -> Figures:
    """Compute the figures of some positions from their logits [positions, vocabulary].

    `targets`: the next tokens. `reference` may be on another device.
    """
    picked = torch.tensor(targets, device=logits.device)[:, None]
    own = logits.log_softmax(dim=-1)
    own_next = own.gather(-1, picked)
    empty = np.empty(0)
    if reference is None:
        return Figures(
            nll=_host(-own_next[:, 0]), reference_nll=empty, kl=empty, agree=empty, shift=empty
        )
    other = reference.to(logits.device).log_softmax(dim=-1)
    other_next = other.gather(-1, picked)
    agree = own.argmax(dim=-1) == other.argmax(dim=-1)
    shift = ((own > own_next).sum(dim=-1) - (other > other_next).sum(dim=-1)).abs()
    kl = (other - own).mul_(other.exp()).sum(dim=-1).clamp_min_(0)
    return Figures(
        nll=_host(-own_next[:, 0]),
        reference_nll=_host(-other_next[:, 0]),
        kl=_host(kl),
        agree=_host(agree),
        shift=_host(shift),
    )


@dataclass(slots=True)
class Tally:
    """Collects the figures of all tokens, for exact percentiles."""

    _parts: list[Figures] = field(default_factory=list)

    def add(self, figures: Figures) -> None:
        self._parts.append(figures)

    @property
    def num_tokens(self) -> int:
        return sum(len(part.nll) for part in self._parts)

    def quality(self) -> Quality:
        """Summarise all tokens so far; there must be at least one."""
        nll = self._all("nll")
        perplexity = _exp(nll.mean())
        error = perplexity * _standard_error(nll)
        kl = self._all("kl")
        if not len(kl):
            return Quality(len(nll), perplexity, error)
        reference_nll = self._all("reference_nll")
        difference = nll - reference_nll
        ratio = _exp(difference.mean())
        comparison = Comparison(
            reference_perplexity=_exp(reference_nll.mean()),
            ppl_ratio=ratio,
            ppl_ratio_error=ratio * _standard_error(difference),
            kl_mean=float(kl.mean()),
            kl_p99=float(np.percentile(kl, 99)),
            kl_max=float(kl.max()),
            agreement=float(self._all("agree").mean()),
            rank_shift=float(self._all("shift").mean()),
        )
        return Quality(
            tokens=len(nll), perplexity=perplexity, perplexity_error=error, against=comparison
        )

    def _all(self, name: str) -> NDArray[Any]:
        return np.concatenate([getattr(part, name) for part in self._parts])


def _host(values: Tensor) -> NDArray[Any]:
    return values.double().cpu().numpy()


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _standard_error(values: NDArray[Any]) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


def _short(value: float | int) -> float | int:
    return value if isinstance(value, int) else float(f"{value:.{_DIGITS}g}")
