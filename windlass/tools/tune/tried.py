"""Settings that were tried, on the simulator or for real, and how good they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from windlass.tools.common.drive import EngineRun
from windlass.tools.common.price import Price
from windlass.tools.common.slo import Slo
from windlass.tools.common.summary import Summary
from windlass.tools.tune.search import Settings

_SAME = 0.02  # throughputs as near as this are the same; then less memory is better
_MOST_NOISE = 0.1  # runs that differ by more say little, and are not taken for the same


@dataclass(frozen=True, slots=True)
class Tried:
    """One row of the report; what was measured has several runs."""

    settings: Settings
    is_measured: bool
    runs: tuple[EngineRun, ...]
    summaries: tuple[Summary, ...]  # of the runs
    slo: Slo
    kv_bytes: int
    price_per_hour: float | None = None

    def again(self, run: EngineRun, summary: Summary) -> Tried:
        """With one more run."""
        return replace(self, runs=(*self.runs, run), summaries=(*self.summaries, summary))

    @property
    def summary(self) -> Summary:
        """The run in the middle; of two the slower."""
        ordered = sorted(self.summaries, key=lambda each: each.output_throughput)
        return ordered[(len(ordered) - 1) // 2]

    @property
    def spread(self) -> float:
        """How far the runs' throughputs are apart, as a share of the highest."""
        speeds = [each.output_throughput for each in self.summaries]
        return 1 - min(speeds) / max(speeds) if max(speeds) > 0 else 0.0

    @property
    def worst(self) -> Summary:
        """The run that is furthest from the promise: it is kept when every run keeps it."""
        return max(self.summaries, key=self.slo.excess)

    @property
    def excess(self) -> float:
        return self.slo.excess(self.worst)

    def noise(self, other: Tried) -> float:
        """Two whose speeds differ by less than this are the same, as far as anybody knows."""
        return min(_MOST_NOISE, max(_SAME, self.spread, other.spread))

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
        return (True, speed, *(-number for number in self.size))

    @property
    def size(self) -> tuple[int, int, int]:
        """What it takes: bytes of the cache first."""
        own = self.settings
        return (self.kv_bytes, own.max_num_seqs, own.max_num_batched_tokens)

    @property
    def figures(self) -> tuple[Any, ...]:
        """What tells it from others that do the same."""
        return (self.settings.form.name, self.summary.output_throughput, self.summary.duration)

    @property
    def usd_per_million(self) -> float | None:
        """Dollars per million tokens out."""
        return Price(self.price_per_hour, "").per_million(self.summary.output_throughput)

    def row(self) -> dict[str, Any]:
        """For the table and the record."""
        figures, kept, run = self.summary.row(), self.settings.form.quality, self.runs[-1]
        names = ("output_throughput", "request_throughput", "request_goodput")
        usd = self.usd_per_million
        row: dict[str, Any] = {
            "settings": self.settings.title,
            "how": "measured" if self.is_measured else "predicted",
            **{name: figures[name] for name in names},
            "runs": len(self.runs),
            "spread_pct": round(100 * self.spread, 1) if len(self.runs) > 1 else None,
        }
        for metric in ("ttft", "tpot", "e2el"):
            for name in ("median", "p99"):
                row[f"{name}_{metric}_ms"] = figures.get(f"{name}_{metric}_ms")
        return row | {
            "quality": kept.value,
            "quality_basis": kept.basis,
            "usd_per_million": None if usd is None else round(usd, 4),
            "kv_mib": round(self.kv_bytes / 2**20, 1),
            "kv_peak_pct": round(100 * run.peak_kv, 2),
            "preemptions": run.num_preemptions,
            "drafted": run.num_drafted,
            "accepted": run.num_accepted,
            "slo": "met" if self.is_good else "; ".join(self.slo.misses(self.worst)),
            "options": self.settings.options(),
        }


def best_of(items: Sequence[Tried]) -> Tried | None:
    """The fastest that keeps the promise; of those as fast, as far as their runs tell, the smallest."""
    good = [item for item in items if item.is_good]
    if not good:
        return max(items, key=lambda item: item.rank, default=None)
    top = max(good, key=lambda item: item.summary.output_throughput)
    return min(as_fast_as(top, good), key=lambda item: item.size)


def as_fast_as(top: Tried, items: Sequence[Tried]) -> list[Tried]:
    """Those whose distance from the fastest may be chance, itself among them."""
    speed = top.summary.output_throughput
    return [
        item
        for item in items
        if item is top or item.summary.output_throughput >= speed * (1 - top.noise(item))
    ]
