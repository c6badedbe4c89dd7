"""A histogram that is observed for every token: numbers in a list, a metric only when it is read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from prometheus_client import CollectorRegistry, Histogram, Metric
from prometheus_client.registry import Collector


class Tally(Collector):
    """Read as a Histogram with one label. One thread observes; there is no lock."""

    def __init__(
        self,
        name: str,
        help: str,
        label: tuple[str, str],
        buckets: tuple[float, ...],
        registry: CollectorRegistry,
    ) -> None:
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        self._form = Histogram(name, help, label[:1], registry=None, buckets=buckets)
        self._form.labels(label[1])
        registry.register(self)

    def observe(self, amount: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, amount)] += times
        self._sum += amount * times

    def describe(self) -> Iterable[Metric]:
        return self._form.describe()

    def collect(self) -> Iterable[Metric]:
        """What the form says, with the numbers from here."""
        [metric] = self._form.collect()
        buckets = accumulate(self._counts)
        totals = {"_count": sum(self._counts), "_sum": self._sum}
        for at, sample in enumerate(metric.samples):
            ending = sample.name.removeprefix(metric.name)
            value = next(buckets) if ending == "_bucket" else totals.get(ending, sample.value)
            metric.samples[at] = sample._replace(value=float(value))
        return [metric]
