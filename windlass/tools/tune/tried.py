"""Settings that were tried, on the simulator or for real, and how good they are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from windlass.tools.load.summary import Summary
from windlass.tools.plan.replay import Replayed
from windlass.tools.plan.slo import Slo
from windlass.tools.tune.space import Settings

_SAME = 0.02  # throughputs as near as this are the same; then less memory is better


@dataclass(frozen=True, slots=True)
class Tried:
    """One row of the report."""

    settings: Settings
    is_measured: bool
    run: Replayed
    summary: Summary
    slo: Slo
    kv_bytes: int
    price_per_hour: float | None = None

    @property
    def excess(self) -> float:
        return self.slo.excess(self.summary)

    @property
    def is_good(self) -> bool:
        return self.excess <= 0

    @property
    def score(self) -> float:
        """For the search: tokens a second where the promise is kept, else how far it is missed."""
        if self.is_good:
            return self.summary.output_throughput
        return -min(self.excess, 1e6)

    @property
    def rank(self) -> tuple[Any, ...]:
        """Good before bad; the faster; of the same speed the one with less memory, then smaller."""
        if not self.is_good:
            return (False, -self.excess, self.summary.output_throughput)
        speed = round(math.log(self.summary.output_throughput) / math.log1p(_SAME))
        own = self.settings
        return (True, speed, -self.kv_bytes, -own.max_num_seqs, -own.max_num_batched_tokens)

    @property
    def figures(self) -> tuple[Any, ...]:
        """What tells it from others that do the same."""
        return (self.settings.form.name, self.summary.output_throughput, self.summary.duration)

    @property
    def usd_per_million(self) -> float | None:
        """Dollars per million tokens out."""
        speed = self.summary.output_throughput
        if self.price_per_hour is None or speed <= 0:
            return None
        return self.price_per_hour / 3600 / speed * 1e6

    def row(self) -> dict[str, Any]:
        """For the table and the record."""
        figures, kept = self.summary.row(), self.settings.form.quality
        names = ("output_throughput", "request_throughput", "request_goodput")
        usd = self.usd_per_million
        row: dict[str, Any] = {
            "settings": self.settings.title,
            "how": "measured" if self.is_measured else "predicted",
            **{name: figures[name] for name in names},
        }
        for metric in ("ttft", "tpot", "e2el"):
            for name in ("median", "p99"):
                row[f"{name}_{metric}_ms"] = figures.get(f"{name}_{metric}_ms")
        return row | {
            "quality": kept.value,
            "quality_basis": kept.basis,
            "usd_per_million": None if usd is None else round(usd, 4),
            "kv_mib": round(self.kv_bytes / 2**20, 1),
            "kv_peak_pct": round(100 * self.run.peak_kv, 2),
            "preemptions": self.run.num_preemptions,
            "drafted": self.run.num_drafted,
            "accepted": self.run.num_accepted,
            "slo": "met" if self.is_good else "; ".join(self.slo.misses(self.summary)),
            "options": self.settings.options(),
        }
