"""Prometheus metrics by tenant, with a bound on the number of label values."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from windlass.core.types import Timeline
from windlass.serve.metric_samples import MetricSample
from windlass.serve.vllm_metrics import PREFIX

OTHER = "other"  # the label of all tenants beyond the bound
_LABEL = "tenant"
_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)


class TenantMetrics:
    """Owns the labels: the first `max_tenants` tenants have their own, and keep it."""

    def __init__(self, registry: CollectorRegistry, model_name: str, max_tenants: int) -> None:
        self._registry = registry
        self._model_name = model_name
        self._max_tenants = max_tenants
        self._known: set[str] = set()
        self._requests = self._counter(
            "requests", "Ended requests of a tenant by outcome.", "outcome"
        )
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of started requests.")
        self._cached = self._counter(
            "prompt_tokens_cached", "Prompt tokens found in the prefix cache."
        )
        self._generated = self._counter(
            "generation_tokens", "Generated tokens of finished completions."
        )
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.")
        self._queue = self._histogram("queue_time_seconds", "Time in the queue.")

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        labels = "model_name", _LABEL, *labels
        return Counter(f"{PREFIX}tenant_{name}", help, labels, registry=self._registry)

    def _histogram(self, name: str, help: str) -> Histogram:
        return Histogram(
            f"{PREFIX}tenant_{name}",
            help,
            ("model_name", _LABEL),
            registry=self._registry,
            buckets=_SECONDS,
        )

    def label_of(self, tenant: str) -> str:
        """The label of a tenant: its name, or OTHER; "": a request that was refused before its key was read."""
        if tenant not in self._known:
            if tenant in ("", OTHER) or len(self._known) >= self._max_tenants:
                return OTHER
            self._known.add(tenant)
        return tenant

    def relabelled(self, sample: MetricSample) -> MetricSample:
        """A sample of another process with the label that this process gives to its tenant."""
        tenant = sample.labels.get(_LABEL)
        if tenant is None:
            return sample
        labels = {**sample.labels, _LABEL: self.label_of(tenant)}
        return MetricSample(sample.name, labels, sample.value)

    def ended(self, tenant: str, outcome: str) -> None:
        self._requests.labels(self._model_name, self.label_of(tenant), outcome).inc()

    def first_token(self, tenant: str, since_arrival_s: float, timeline: Timeline) -> None:
        labels = self._model_name, self.label_of(tenant)
        self._ttft.labels(*labels).observe(since_arrival_s)
        self._prompt.labels(*labels).inc(timeline.num_prompt)
        self._cached.labels(*labels).inc(timeline.num_cached)
        if timeline.admitted is not None:
            self._queue.labels(*labels).observe(timeline.admitted - timeline.arrived)

    def finished(self, tenant: str, num_tokens: int) -> None:
        self._generated.labels(self._model_name, self.label_of(tenant)).inc(num_tokens)
