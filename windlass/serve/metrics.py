"""Prometheus metrics, named after vLLM's where there is an equivalent.

engine_metrics.py has those of an engine; client-side latencies are measured here. Received requests always equal the sum of the outcomes and the requests in flight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from windlass.core.types import EngineStats, Timeline
from windlass.serve.connections import Connections
from windlass.serve.engine_metrics import COUNTS, EngineFamilies, EngineMetrics, EngineState
from windlass.serve.fast_histogram import FastHistogram
from windlass.serve.metric_samples import MergedRegistry, MetricSample, TenantView
from windlass.serve.tenant_metrics import TenantMetrics
from windlass.serve.vllm_metrics import PREFIX, MetricsPrefix, Naming

Outcome = Literal["success", "error", "aborted", "rejected"]

_LABEL = "model_name"

_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640),
)
_NEXT_TOKEN = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40),
)
_LATENCY = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50),
    *(60, 120, 240, 480, 960, 1920),
)
_SHORT = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by level, as in vLLM
_FEW = (1, 2, 5, 10, 20, 50, 100)


class WorkerMetrics(Protocol):
    """The metrics of the HTTP workers."""

    async def refresh(self) -> None:
        """Ask the workers for their current metrics."""

    def samples(self) -> Sequence[MetricSample]:
        """The samples of all workers, also of those that have ended."""
        ...


class Metrics:
    """Owns a separate registry, so that two servers in one process do not share metrics."""

    def __init__(
        self,
        model_name: str,
        num_replicas: int = 1,
        prefix: MetricsPrefix = "windlass",
        max_tenants: int = 100,
    ) -> None:
        self.registry = CollectorRegistry()
        self.workers: WorkerMetrics | None = None  # None: this process has all metrics
        self._naming = Naming(prefix, num_replicas)
        self._replicas: Sequence[EngineState] = ()
        self._models: list[tuple[Metrics, Callable[[], Sequence[bool]]]] = []  # of --fallback
        self._model_name = model_name
        families = EngineFamilies(self.registry, model_name, num_replicas)
        self._engines = [EngineMetrics(families, replica) for replica in range(num_replicas)]
        self._sleep = Gauge(
            f"{PREFIX}engine_sleep_state",
            "1 for the current state: awake, asleep with weights on disk, or asleep without a process.",
            (_LABEL, "sleep_state"),
            registry=self.registry,
        )
        self._tenants = TenantMetrics(self.registry, model_name, max_tenants)
        self._request_metrics()
        self._connection_metrics()
        self._histograms()

    def _request_metrics(self) -> None:
        self._received = self._counter("requests_received", "Completion requests received.")
        self._in_flight = self._gauge("requests_in_flight", "Requests received and not ended.")
        self._outcomes = self._labelled(
            "request_outcomes",
            "Ended requests by outcome; the sum plus the requests in flight equals the received ones.",
            "outcome",
        )
        self._success = self._labelled(
            "request_success", "Completions by finish reason.", "finished_reason"
        )
        self._rejections = self._labelled(
            "admission_rejections", "Requests refused because the queue was full.", "reason"
        )
        self._fallbacks = self._labelled(
            "request_fallbacks",
            "Requests answered by a --fallback, by reason and by the model that answered.",
            "reason",
            "fallback_model",
        )
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of started requests.")
        self._cached = self._counter(
            "prompt_tokens_cached",
            "Prompt tokens of started requests that were found in the prefix cache.",
        )
        self._by_source = self._labelled(
            "prompt_tokens_by_source",
            "Prompt tokens of started requests: computed, found on the device, or loaded from a KV tier.",
            "source",
        )

        self._handovers = self._labelled(
            "handovers",
            "Requests with --prefill-replicas or --role decode: handed over, or why one engine computed them or a part again.",
            "result",
        )
        self._handover_blocks = self._counter(
            "handover_blocks", "KV blocks that prefill engines handed over."
        )

    def _connection_metrics(self) -> None:
        self._connections = self._gauge("http_connections", "Open HTTP connections.")
        self._body_bytes = self._gauge(
            "http_buffered_body_bytes", "Bytes of request bodies in reception."
        )
        self._worker_restarts = self._counter(
            "http_worker_restarts", "HTTP workers that ended and were restarted."
        )
        self._cuts = self._labelled(
            "http_connections_cut",
            "Connections that the server refused or closed, by reason.",
            "reason",
        )

    def _histograms(self) -> None:
        histogram = self._histogram
        self._ttft = histogram(
            "time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN
        )
        label = _LABEL, self._model_name
        name = f"{PREFIX}inter_token_latency_seconds"
        self._itl = FastHistogram(
            name, "Time between tokens.", label=label, buckets=_NEXT_TOKEN, registry=self.registry
        )
        self._tpot = histogram(
            "request_time_per_output_token_seconds",
            "Mean time per output token of a request.",
            _NEXT_TOKEN,
        )
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to last token.", _LATENCY)
        self._queue = histogram("request_queue_time_seconds", "Time in the queue.", _LATENCY)
        self._prefill = histogram(
            "request_prefill_time_seconds", "Admission to first token.", _LATENCY
        )
        self._decode = histogram("request_decode_time_seconds", "First to last token.", _LATENCY)
        self._inference = histogram(
            "request_inference_time_seconds", "Admission to last token.", _LATENCY
        )
        self._before_engine = {
            "template": histogram(
                "request_template_time_seconds", "Rendering the chat template.", _SHORT
            ),
            "tokenize": histogram(
                "request_tokenize_time_seconds",
                "Tokenizing the prompts and checking the sampling parameters.",
                _SHORT,
            ),
        }
        self._num_prompt = histogram("request_prompt_tokens", "Prompt tokens.", COUNTS)
        self._num_computed = histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens that were not found in the prefix cache.",
            COUNTS,
        )
        self._num_output = histogram("request_generation_tokens", "Generated tokens.", COUNTS)
        self._max_output = histogram(
            "request_max_num_generation_tokens",
            "Generated tokens of the longest of a request's completions.",
            COUNTS,
        )
        self._preemptions = histogram(
            "request_num_preemptions", "Preemptions of a completion.", (0, *_FEW)
        )
        self._param_max = histogram("request_params_max_tokens", "Requested max_tokens.", COUNTS)
        self._param_n = histogram("request_params_n", "Requested n.", _FEW)

    def _gauge(self, name: str, help: str) -> Gauge:
        gauge = Gauge(PREFIX + name, help, (_LABEL,), registry=self.registry)
        return gauge.labels(self._model_name)

    def _counter(self, name: str, help: str) -> Counter:
        counter = Counter(PREFIX + name, help, (_LABEL,), registry=self.registry)
        return counter.labels(self._model_name)

    def _labelled(self, name: str, help: str, *labels: str) -> Counter:
        """A counter with labels beside the model's name."""
        return Counter(PREFIX + name, help, (_LABEL, *labels), registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            PREFIX + name, help, (_LABEL,), registry=self.registry, buckets=buckets
        )
        return histogram.labels(self._model_name)

    def render(
        self, engines_up: Sequence[bool], sleep_level: int = 0, tenant: str | None = None
    ) -> bytes:
        """The exposition; `engines_up`: whether each replica is healthy.

        `tenant`: without the samples of other tenants; None: all.
        """
        self._refresh(engines_up, sleep_level)
        for model, models_up in self._models:
            model._refresh(models_up(), sleep_level)
        shown = self._all() if tenant is None else TenantView(self._all(), tenant)
        return generate_latest(self._naming.apply(shown))

    def _refresh(self, engines_up: Sequence[bool], sleep_level: int) -> None:
        """Set the gauges that are read, not counted."""
        for engine, is_up in zip(self._engines, engines_up, strict=True):
            engine.up.set(is_up)
            if not is_up:
                engine.observe_down()
        for engine, replica in zip(self._engines, self._replicas, strict=False):
            engine.observe_process(replica)
        for level, state in enumerate(_SLEEP_STATES):
            self._sleep.labels(self._model_name, state).set(level == sleep_level)

    def _all(self) -> CollectorRegistry:
        """The metrics of all processes and models."""
        if self.workers is None and not self._models:
            return self.registry
        workers = () if self.workers is None else self.workers.samples()
        samples = [self._tenants.relabelled(each) for each in workers]
        for model, _ in self._models:
            samples += model._samples()
        return MergedRegistry(self.registry, samples)

    def add_model(self, model: Metrics, engines_up: Callable[[], Sequence[bool]]) -> None:
        """Show the metrics of another model beside those of this one."""
        self._models.append((model, engines_up))

    async def refresh_workers(self) -> None:
        """Get the current metrics of the HTTP workers, if there are any."""
        if self.workers is not None:
            await self.workers.refresh()

    def samples(self) -> list[MetricSample]:
        """All samples that are not zero, to be added to those of another process."""
        return [sample for sample in self._samples() if sample.value]

    def _samples(self) -> list[MetricSample]:
        return [
            MetricSample(sample.name, sample.labels, sample.value)
            for metric in self.registry.collect()
            for sample in metric.samples
            if not sample.name.endswith("_created")
        ]

    def latencies(self) -> dict[str, dict[str, list[float | None]]]:
        """Cumulative counts of the latency histograms by upper bound; the last bound is None."""
        histograms = {"ttft": self._ttft, "tpot": self._tpot, "queue": self._queue}
        others = self.workers.samples() if self.workers is not None else ()
        own = [each for each in others if each.labels.get(_LABEL) == self._model_name]
        return {name: _buckets(histogram, own) for name, histogram in histograms.items()}

    def observe_stats(self, stats: EngineStats, last: EngineStats, replica: int = 0) -> None:
        """Add the difference of two stats of a replica's engine; a new engine counts from zero."""
        self._engines[replica].observe(stats, last)

    def watch_engines(self, replicas: Sequence[EngineState]) -> None:
        """Read the state of the engines whenever the metrics are rendered."""
        self._replicas = replicas

    def worker_restarted(self) -> None:
        self._worker_restarts.inc()

    # ---- connections -------------------------------------------------------------------------

    def watch_connections(self, connections: Connections) -> None:
        """Read the numbers of connections and body bytes whenever the metrics are rendered."""
        self._connections.set_function(lambda: connections.num_open)
        self._body_bytes.set_function(lambda: connections.num_body_bytes)

    def connection_cut(self, reason: str) -> None:
        self._cuts.labels(self._model_name, reason).inc()

    # ---- requests ----------------------------------------------------------------------------

    def received(self) -> None:
        self._received.inc()
        self._in_flight.inc()

    def ended(self, outcome: Outcome, tenant: str) -> None:
        self._tenants.ended(tenant, outcome)
        self._in_flight.dec()
        self._outcomes.labels(self._model_name, outcome).inc()

    def handover(self, result: str, num_blocks: int) -> None:
        """Count a request of a server with prefill engines; serve/handover.py has the results."""
        self._handovers.labels(self._model_name, result).inc()
        self._handover_blocks.inc(num_blocks)

    def rejected(self, reason: str) -> None:
        self._rejections.labels(self._model_name, reason).inc()

    def fell_back(self, reason: str, model: str) -> None:
        """Count an answer of a --fallback."""
        self._fallbacks.labels(self._model_name, reason, model).inc()

    def phase_ended(self, phase: str, seconds: float) -> None:
        """A phase before the engine has ended; those without a histogram are in traces only."""
        if (histogram := self._before_engine.get(phase)) is not None:
            histogram.observe(seconds)

    def params(self, n: int, max_tokens: int | None) -> None:
        self._param_n.observe(n)
        if max_tokens is not None:
            self._param_max.observe(max_tokens)

    def first_token(self, since_arrival_s: float, timeline: Timeline, tenant: str) -> None:
        self._tenants.first_token(tenant, since_arrival_s, timeline)
        self._ttft.observe(since_arrival_s)
        self._prompt.inc(timeline.num_prompt)
        self._cached.inc(timeline.num_cached)
        num_computed = timeline.num_prompt - timeline.num_cached
        self._num_computed.observe(num_computed)
        self._by_source.labels(self._model_name, "local_compute").inc(num_computed)
        num_local = timeline.num_cached - timeline.num_loaded
        self._by_source.labels(self._model_name, "local_cache_hit").inc(num_local)
        self._by_source.labels(self._model_name, "external_kv_transfer").inc(timeline.num_loaded)
        self._num_prompt.observe(timeline.num_prompt)
        if timeline.admitted is not None and timeline.first_token is not None:
            self._queue.observe(timeline.admitted - timeline.arrived)
            self._prefill.observe(timeline.first_token - timeline.admitted)

    def next_tokens(self, since_last_s: float, num_tokens: int) -> None:
        self._itl.observe(since_last_s / num_tokens, num_tokens)

    def finished(
        self,
        reason: str,
        *,
        num_tokens: int,
        decode_s: float,
        total_s: float,
        tenant: str,
        timeline: Timeline | None = None,
    ) -> None:
        """Count a finished completion. Times are those of the HTTP process."""
        self._tenants.finished(tenant, num_tokens)
        self._success.labels(self._model_name, reason).inc()
        if timeline is not None:
            self._preemptions.observe(timeline.num_preemptions)
            if timeline.admitted is not None and timeline.first_token is not None:
                self._inference.observe(timeline.first_token - timeline.admitted + decode_s)
        self._num_output.observe(num_tokens)
        self._decode.observe(decode_s)
        self._e2e.observe(total_s)
        if num_tokens > 1:
            self._tpot.observe(decode_s / (num_tokens - 1))

    def all_finished(self, max_num_tokens: int) -> None:
        """Count the longest of the completions of one prompt."""
        self._max_output.observe(max_num_tokens)


def _buckets(histogram: Histogram, others: Sequence[MetricSample]) -> dict[str, list[float | None]]:
    """The buckets of a histogram, with those of other processes; cheaper than to collect a registry."""
    [metric] = histogram.collect()
    name = f"{metric.name}_bucket"
    counts = {each.labels["le"]: each.value for each in metric.samples if each.name == name}
    for each in others:
        if each.name == name:
            counts[each.labels["le"]] += each.value
    bounds = map(float, counts)
    return {
        "le": [None if math.isinf(bound) else bound for bound in bounds],
        "counts": list(counts.values()),
    }
