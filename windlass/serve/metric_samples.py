"""Adds the metrics of other processes to those of a registry."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import msgspec
from prometheus_client import CollectorRegistry, Metric

_SUFFIXES = ("", "_total", "_bucket", "_sum", "_count")


class MetricSample(msgspec.Struct, frozen=True, array_like=True):
    """The value of one metric with these labels."""

    name: str
    labels: dict[str, str]
    value: float


def add_up(samples: Iterable[MetricSample]) -> list[MetricSample]:
    """The sums of samples with the same name and labels, in the order of the first of each."""
    sums: dict[tuple[str, frozenset[tuple[str, str]]], MetricSample] = {}
    for sample in samples:
        key = sample.name, frozenset(sample.labels.items())
        value = sample.value + (sums[key].value if key in sums else 0.0)
        sums[key] = MetricSample(sample.name, sample.labels, value)
    return list(sums.values())


_ADAPTERS = "running_lora_adapters"


class TenantView(CollectorRegistry):
    """Shows `registry` without the samples of other tenants, and without adapters, which may be theirs."""

    def __init__(self, registry: CollectorRegistry, tenant: str) -> None:
        super().__init__()
        self._registry = registry
        self._tenant = tenant

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [each for each in metric.samples if self._may_see(each.labels)]
            yield metric

    def _may_see(self, labels: Mapping[str, str]) -> bool:
        owners = {labels[name] for name in ("tenant", "key") if name in labels}
        return owners <= {self._tenant} and _ADAPTERS not in labels


class MergedRegistry(CollectorRegistry):
    """Shows `registry` with `samples` added to its samples of the same name and labels."""

    def __init__(self, registry: CollectorRegistry, samples: Iterable[MetricSample]) -> None:
        super().__init__()
        self._registry = registry
        self._samples: defaultdict[str, list[MetricSample]] = defaultdict(list)
        for sample in add_up(samples):
            self._samples[sample.name].append(sample)

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            added = {
                (each.name, frozenset(each.labels.items())): each
                for suffix in _SUFFIXES
                for each in self._samples.get(metric.name + suffix, ())
            }
            for at, sample in enumerate(metric.samples):
                more = added.pop((sample.name, frozenset(sample.labels.items())), None)
                if more is not None:
                    metric.samples[at] = sample._replace(value=sample.value + more.value)
            for more in added.values():  # with labels that only the other processes have
                metric.add_sample(more.name, more.labels, more.value)
            yield metric
