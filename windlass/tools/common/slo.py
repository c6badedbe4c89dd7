"""What a service promises: `ttft_p99=500ms,tpot_p99=40ms`, and by how much a run misses it."""

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
    """The most that one figure may be, in milliseconds. `share` None: the mean."""

    metric: str
    share: float | None
    most_ms: float

    @property
    def name(self) -> str:
        return f"{self.metric}_{'mean' if self.share is None else f'p{self.share:g}'}"

    def value(self, summary: Summary) -> float | None:
        """What a run has; None where nothing was measured, such as a time between single tokens."""
        spread = summary.spreads.get(self.metric)
        if spread is None:
            return None
        return spread.mean if self.share is None else spread.percentiles[self.share]

    def excess(self, summary: Summary) -> float:
        """0.5: half as much again as promised; not above 0: it is met."""
        value = self.value(summary)
        return -1.0 if value is None else value / self.most_ms - 1


@dataclass(frozen=True, slots=True)
class Slo:
    """All targets together. Without one, everything that answers all requests meets it."""

    targets: tuple[Target, ...] = ()

    def summarise(self, run: EngineRun) -> Summary:
        """With the percentiles that the targets are about."""
        return summarise(run.timings, run.duration, self.goodput, self.percentiles)

    @property
    def percentiles(self) -> list[float]:
        named = {target.share for target in self.targets if target.share is not None}
        return sorted({*PERCENTILES, *named})

    @property
    def goodput(self) -> dict[str, float]:
        """The limits of a single request; the strictest of each figure."""
        limits: dict[str, float] = {}
        for target in self.targets:
            if target.metric in _PER_REQUEST:
                limits[target.metric] = min(limits.get(target.metric, math.inf), target.most_ms)
        return limits

    def excess(self, summary: Summary) -> float:
        """Of the target that is missed most; infinite where requests failed."""
        if summary.failed or not summary.completed:
            return math.inf
        return max((target.excess(summary) for target in self.targets), default=-1.0)

    def is_met(self, summary: Summary) -> bool:
        return self.excess(summary) <= 0

    def misses(self, summary: Summary) -> list[str]:
        """A sentence for each target that is missed."""
        found = []
        if summary.failed or not summary.completed:
            why = next(iter(summary.errors), "no request was answered")
            found.append(f"{summary.failed} requests failed: {why}")
        for target in self.targets:
            value = target.value(summary)
            if value is not None and value > target.most_ms:
                found.append(
                    f"{target.name} is {value:,.1f} ms, {value - target.most_ms:,.1f} ms "
                    f"({100 * target.excess(summary):.0f} %) above {target.most_ms:g} ms"
                )
        return found

    def __str__(self) -> str:
        return ",".join(f"{item.name}={item.most_ms:g}ms" for item in self.targets)


def parse_slo(texts: Sequence[str]) -> Slo:
    """Targets with commas or spaces, each NAME_STATISTIC=TIME."""
    targets: list[Target] = []
    for text in (part for item in texts for part in item.replace(",", " ").split()):
        found = _TARGET.fullmatch(text)
        if found is None or found[1] not in METRICS:
            raise ConfigError(
                f"--slo {text!r}: expected such as ttft_p99=500ms, tpot_mean=0.04s. "
                f"Names: {', '.join(METRICS)}; then _mean or _p50, _p99; then a time in ms or s."
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
    share = None if statistic == "mean" else float(statistic[1:])
    if not (value > 0 and math.isfinite(value)) or (share is not None and not 0 < share <= 100):
        raise ConfigError(
            f"--slo {text!r}: the time must be above 0, and a percentile above 0 and at most 100."
        )
    return Target(metric, share, value)
