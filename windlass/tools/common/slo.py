"""Service level objectives such as `ttft_p99=500ms,tpot_p99=40ms`, and how far a run misses them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from windlass.errors import ConfigError
from windlass.tools.common.drive import EngineRun
from windlass.tools.common.summary import METRICS, PERCENTILES, Summary, summarise

_TARGET = re.compile(r"([a-z0-9]+)_(mean|p\d+(?:\.\d+)?)\s*(?:=|<=)\s*([0-9.eE+-]+)\s*(ms|s)")
_PER_REQUEST = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Target:
    """Upper limit of one metric in milliseconds. `percentile` None: the mean."""

    metric: str
    percentile: float | None
    max_ms: float

    @property
    def name(self) -> str:
        return f"{self.metric}_{'mean' if self.percentile is None else f'p{self.percentile:g}'}"

    def value(self, summary: Summary) -> float | None:
        """The measured value; None without one, such as the TPOT of single-token outputs."""
        spread = summary.spreads.get(self.metric)
        if spread is None:
            return None
        return spread.mean if self.percentile is None else spread.percentiles[self.percentile]

    def excess(self, summary: Summary) -> float:
        """Relative excess over the limit: 0.5 is 50 % above it, 0 or less meets it."""
        value = self.value(summary)
        return -1.0 if value is None else value / self.max_ms - 1


@dataclass(frozen=True, slots=True)
class Slo:
    """All targets of a run. Without targets, a run without failed requests meets it."""

    targets: tuple[Target, ...] = ()

    def summarise(self, run: EngineRun) -> Summary:
        """Summarise a run, including the percentiles of the targets."""
        return summarise(run.timings, run.duration, self.goodput, self.percentiles)

    @property
    def percentiles(self) -> list[float]:
        own = {target.percentile for target in self.targets if target.percentile is not None}
        return sorted({*PERCENTILES, *own})

    @property
    def goodput(self) -> dict[str, float]:
        """Limits of a single request: the strictest target of each metric."""
        limits: dict[str, float] = {}
        for target in self.targets:
            if target.metric in _PER_REQUEST:
                limits[target.metric] = min(limits.get(target.metric, math.inf), target.max_ms)
        return limits

    def excess(self, summary: Summary) -> float:
        """The largest excess of any target; infinite when requests failed."""
        if summary.failed or not summary.completed:
            return math.inf
        return max((target.excess(summary) for target in self.targets), default=-1.0)

    def is_met(self, summary: Summary) -> bool:
        return self.excess(summary) <= 0

    def misses(self, summary: Summary) -> list[str]:
        """One sentence per missed target."""
        found = []
        if summary.failed or not summary.completed:
            reason = next(iter(summary.errors), "no request completed")
            found.append(f"{summary.failed} requests failed: {reason}")
        for target in self.targets:
            value = target.value(summary)
            if value is not None and value > target.max_ms:
                found.append(
                    f"{target.name} is {value:,.1f} ms, {value - target.max_ms:,.1f} ms "
                    f"({100 * target.excess(summary):.0f} %) above {target.max_ms:g} ms"
                )
        return found

    def __str__(self) -> str:
        return ",".join(f"{item.name}={item.max_ms:g}ms" for item in self.targets)


def parse_slo(texts: Sequence[str]) -> Slo:
    """Parse targets NAME_STATISTIC=TIME, separated by commas or spaces."""
    targets: list[Target] = []
    for text in (part for item in texts for part in item.replace(",", " ").split()):
        found = _TARGET.fullmatch(text)
        if found is None or found[1] not in METRICS:
            raise ConfigError(
                f"--slo {text!r}: expected a target such as ttft_p99=500ms or tpot_mean=0.04s: "
                f"{', '.join(METRICS)}, then _mean, _p50 or _p99, then a time in ms or s."
            )
        target = _target(text, *found.groups())
        if target.name in [other.name for other in targets]:
            raise ConfigError(f"--slo has {target.name} twice.")
        targets.append(target)
    return Slo(tuple(targets))


def _target(text: str, metric: str, statistic: str, number: str, unit: str) -> Target:
    try:
        value = float(number) * (1e3 if unit == "s" else 1.0)
    except ValueError:
        value = math.nan
    percentile = None if statistic == "mean" else float(statistic[1:])
    in_range = percentile is None or 0 < percentile <= 100
    if not (value > 0 and math.isfinite(value) and in_range):
        raise ConfigError(
            f"--slo {text!r}: the time must be above 0, and a percentile above 0 and at most 100."
        )
    return Target(metric, percentile, value)
