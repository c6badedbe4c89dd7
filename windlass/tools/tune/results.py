"""Results of settings that were simulated or measured, and their order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from windlass.tools.common.drive import EngineRun
from windlass.tools.common.price import Price
from windlass.tools.common.slo import Slo
from windlass.tools.common.summary import Summary
from windlass.tools.tune.space import Settings

_SAME_SPEED = 0.02  # throughputs this near are equal; then less memory is better
_MAX_NOISE = 0.1  # a larger spread between runs does not make settings equal


@dataclass(frozen=True, slots=True)
class TrialResult:
    """Figures of one point of the search space: one simulated run, or several measured runs."""

    settings: Settings
    is_measured: bool
    runs: tuple[EngineRun, ...]
    summaries: tuple[Summary, ...]  # of the runs
    slo: Slo
    kv_bytes: int
    price_per_hour: float | None = None

    def with_run(self, run: EngineRun, summary: Summary) -> TrialResult:
        return replace(self, runs=(*self.runs, run), summaries=(*self.summaries, summary))

    @property
    def summary(self) -> Summary:
        """The run with the median throughput; of two, the slower."""
        ordered = sorted(self.summaries, key=lambda each: each.output_throughput)
        return ordered[(len(ordered) - 1) // 2]

    @property
    def spread(self) -> float:
        """The difference between the runs' throughputs, relative to the highest."""
        speeds = [each.output_throughput for each in self.summaries]
        return 1 - min(speeds) / max(speeds) if max(speeds) > 0 else 0.0

    @property
    def worst(self) -> Summary:
        """The run that is furthest from the SLO: every run must meet it."""
        return max(self.summaries, key=self.slo.excess)

    @property
    def excess(self) -> float:
        return self.slo.excess(self.worst)

    def noise(self, other: TrialResult) -> float:
        """Return the relative difference in throughput that may be chance."""
        return min(_MAX_NOISE, max(_SAME_SPEED, self.spread, other.spread))

    @property
    def meets_slo(self) -> bool:
        return self.excess <= 0

    @property
    def score(self) -> float:
        """The objective of the search: tokens per second if the SLO is met, else minus the excess."""
        if self.meets_slo:
            return self.summary.output_throughput
        return -min(self.excess, 1e6)

    @property
    def rank(self) -> tuple[Any, ...]:
        """Sort key: SLO met, then throughput; at equal throughput less memory, then smaller limits."""
        if not self.meets_slo:
            return (False, -self.excess, self.summary.output_throughput)
        speed = round(math.log(self.summary.output_throughput) / math.log1p(_SAME_SPEED))
        return (True, speed, *(-number for number in self.size))

    @property
    def size(self) -> tuple[int, int, int]:
        """KV cache bytes, sequences and tokens per step."""
        own = self.settings
        return (self.kv_bytes, own.max_num_seqs, own.max_num_batched_tokens)

    @property
    def figures(self) -> tuple[Any, ...]:
        """Equal for settings that make no difference to each other."""
        return (self.settings.format.name, self.summary.output_throughput, self.summary.duration)

    @property
    def usd_per_million(self) -> float | None:
        return Price(self.price_per_hour, "").per_million(self.summary.output_throughput)

    def row(self) -> dict[str, Any]:
        figures, quality, run = self.summary.row(), self.settings.format.quality, self.runs[-1]
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
            "quality": quality.value,
            "quality_basis": quality.basis,
            "usd_per_million": None if usd is None else round(usd, 4),
            "kv_mib": round(self.kv_bytes / 2**20, 1),
            "kv_peak_pct": round(100 * run.peak_kv, 2),
            "preemptions": run.num_preemptions,
            "drafted": run.num_drafted,
            "accepted": run.num_accepted,
            "slo": "met" if self.meets_slo else "; ".join(self.slo.misses(self.worst)),
            "options": self.settings.options(),
        }


def best_of(items: Sequence[TrialResult]) -> TrialResult | None:
    """Return the fastest that meets the SLO; among equally fast ones, the smallest."""
    good = [item for item in items if item.meets_slo]
    if not good:
        return max(items, key=lambda item: item.rank, default=None)
    top = max(good, key=lambda item: item.summary.output_throughput)
    return min(as_fast_as(top, good), key=lambda item: item.size)


def as_fast_as(top: TrialResult, items: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the results whose difference from `top` may be chance, including `top`."""
    speed = top.summary.output_throughput
    return [
        item
        for item in items
        if item is top or item.summary.output_throughput >= speed * (1 - top.noise(item))
    ]
