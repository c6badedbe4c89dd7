"""Searches the highest request rate at which enough requests meet their targets.

Doubles the rate until too few requests meet them, then bisects geometrically. Sends no requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

INITIAL_RATE = 1.0
_MAX_RATIO = 1.1  # stop when the lowest failing rate is this close to the best
_MAX_RUNS = 14
_MIN_RATE, _MAX_RATE = 1 / 64, 65536.0


@dataclass(slots=True)
class RateSearch:
    """Owns the result of each rate: the share of its requests that met every target."""

    min_share: float  # above 0 and up to 1
    shares: dict[float, float] = field(default_factory=dict)  # by rate

    def add(self, rate: float, share: float) -> None:
        self.shares[rate] = share

    @property
    def lowest_failing(self) -> float | None:
        """The lowest rate that was too high."""
        return min((r for r, share in self.shares.items() if share < self.min_share), default=None)

    @property
    def best(self) -> float | None:
        """The highest passing rate below all failing ones."""
        above = self.lowest_failing or math.inf
        passing = (r for r, share in self.shares.items() if share >= self.min_share and r < above)
        return max(passing, default=None)

    def next_rate(self) -> float | None:
        """The next rate to measure; None: the search is finished."""
        if not self.shares:
            return INITIAL_RATE
        best, failing = self.best, self.lowest_failing
        if len(self.shares) >= _MAX_RUNS:
            return None
        if failing is None:
            return best * 2 if best is not None and best < _MAX_RATE else None
        if best is None:
            return failing / 2 if failing > _MIN_RATE else None
        return None if failing / best <= _MAX_RATIO else float(f"{math.sqrt(best * failing):.3g}")

    def verdict(self) -> str:
        best, failing = self.best, self.lowest_failing
        goal = f"at least {self.min_share:.0%} of the requests meet the targets"
        if best is None and failing is None:
            return "No rate was measured to its end."
        if best is None:
            assert failing is not None
            share = self.shares[failing]
            return f"No rate was found at which {goal}: {share:.0%} at {failing:g} req/s."
        found = f"Highest rate at which {goal}: {best:g} req/s ({self.shares[best]:.0%})"
        if failing is None:
            return f"{found}; no rate was too high."
        return f"{found}; {self.shares[failing]:.0%} at {failing:g} req/s."
