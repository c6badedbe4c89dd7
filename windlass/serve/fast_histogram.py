"""A Prometheus histogram cheap enough to observe once per token.

Observations go into a list of counts; metric samples are built only when they are read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from prometheus_client import CollectorRegistry, Histogram, Metric
from prometheus_client.registry import Collector


class FastHistogram(Collector):
    """Exported as a Histogram with one label. Has no lock: one thread observes."""

    def __init__(
        self,
        name: str,
        help: str,
        *,
        label: tuple[str, str],
        buckets: tuple[float, ...],
        registry: CollectorRegistry,
    ) -> None:
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        self._template = Histogram(name, help, label[:1], registry=None, buckets=buckets)
        self._template.labels(label[1])
        registry.register(self)

    def observe(self, amount: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, amount)] += times
        self._sum += amount * times

    def describe(self) -> Iterable[Metric]:
        return self._template.describe()

    def collect(self) -> Iterable[Metric]:
        """Fill the samples of the template with the own counts."""
        [metric] = self._template.collect()
        buckets = accumulate(self._counts)
        totals = {"_count": sum(self._counts), "_sum": self._sum}
        for at, sample in enumerate(metric.samples):
            suffix = sample.name.removeprefix(metric.name)
            value = next(buckets) if suffix == "_bucket" else totals.get(suffix, sample.value)
            metric.samples[at] = sample._replace(value=float(value))
        return [metric]
