"""Looks for the highest request rate at which enough requests meet their targets.

Doubles until too few do, then halves the gap on a scale of ratios. Sends nothing itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

FIRST_RATE = 1.0
_NEAR = 1.1  # a good rate and a bad one that are as near as this leave nothing to look for
_MOST_RUNS = 14
_LEAST_RATE, _MOST_RATE = 1 / 64, 65536.0


@dataclass(slots=True)
class Seek:
    """Owns what each rate gave: the share of its requests that met every target."""

    wanted: float  # share, above 0 and up to 1
    shares: dict[float, float] = field(default_factory=dict)  # by rate

    def note(self, rate: float, share: float) -> None:
        self.shares[rate] = share

    @property
    def miss(self) -> float | None:
        """The lowest rate that was too high."""
        return min((r for r, share in self.shares.items() if share < self.wanted), default=None)

    @property
    def best(self) -> float | None:
        """The highest good rate below all that were too high."""
        above = self.miss or math.inf
        good = (r for r, share in self.shares.items() if share >= self.wanted and r < above)
        return max(good, default=None)

    def next_rate(self) -> float | None:
        """None: there is nothing more to find out."""
        if not self.shares:
            return FIRST_RATE
        best, miss = self.best, self.miss
        if len(self.shares) >= _MOST_RUNS:
            return None
        if miss is None:
            return best * 2 if best is not None and best < _MOST_RATE else None
        if best is None:
            return miss / 2 if miss > _LEAST_RATE else None
        return None if miss / best <= _NEAR else float(f"{math.sqrt(best * miss):.3g}")

    def verdict(self) -> str:
        """What was found, in a sentence."""
        best, miss = self.best, self.miss
        wish = f"at least {self.wanted:.0%} of the requests meet the targets"
        if best is None and miss is None:
            return "No rate was measured to its end."
        if best is None:
            assert miss is not None
            return f"At no rate {wish}: at {miss:g} req/s, the lowest, {self.shares[miss]:.0%} do."
        found = f"Highest rate at which {wish}: {best:g} req/s ({self.shares[best]:.0%} do)"
        if miss is None:
            return f"{found}; no rate was too high."
        return f"{found}; at {miss:g} req/s {self.shares[miss]:.0%} do."
