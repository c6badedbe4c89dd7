"""Prometheus metrics, named after vLLM's where there is an equivalent.

Engine counters are differences between the engine's stats; client-side latencies are measured
here. Received requests always equal the sum of the outcomes and the requests in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from windlass.core.types import AdapterStats, EngineStats, GrammarStats, Timeline
from windlass.serve.fast_histogram import FastHistogram

Outcome = Literal["success", "error", "aborted", "rejected"]

_PREFIX = "windlass:"
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
_COUNTS = tuple(2.0**i for i in range(18))
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by level, as in vLLM
_FEW = (1, 2, 5, 10, 20, 50, 100)


class Metrics:
    """Owns a separate registry, so that two servers in one process do not share metrics."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._engine_metrics()
        self._adapter_metrics()
        self._grammar_metrics()
        self._request_metrics()
        self._connection_metrics()
        self._histograms()

    def _engine_metrics(self) -> None:
        self._running = self._gauge("num_requests_running", "Running requests.")
        self._waiting = self._gauge("num_requests_waiting", "Requests in the queue.")
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
        self._up = self._gauge("engine_up", "1 if the engine process is healthy, else 0.")
        self._sleep = Gauge(
            f"{_PREFIX}engine_sleep_state",
            "1 for the current state: awake, asleep with weights on disk, or asleep without a process.",
            (_LABEL, "sleep_state"),
            registry=self.registry,
        )
        self._generated = self._counter("generation_tokens", "Tokens generated.")
        self._preemptions = self._counter(
            "num_preemptions", "Running requests that were preempted."
        )
        self._queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._step_tokens = self._histogram(
            "iteration_tokens_total",
            "Tokens per step, sampled at most ten times per second.",
            _COUNTS,
        )

        self._executors = self._labelled(
            "steps", "Steps by the executor that computed them.", "executor"
        )
        self._executor_refusals = self._labelled(
            "executor_refusals",
            "Steps that an executor refused, by reason; a slower executor computed them.",
            "executor",
            "reason",
        )
        self._drafts = self._counter("spec_decode_num_drafts", "Rows with draft tokens.")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Draft tokens verified.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self._accepted_at = self._labelled(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by position in the row, from 0.",
            "position",
        )
        self._saved = self._counter(
            "spec_decode_num_tokens_saved", "Tokens generated without a step of their own."
        )
        self._drafting = self._counter("spec_decode_draft_seconds", "Time spent drafting.")
        self._length = self._gauge(
            "spec_decode_acceptance_length",
            "Mean tokens per row with draft tokens, its own sampled token included, since the engine started.",
        )

    def _adapter_metrics(self) -> None:
        self._on_device = self._gauge("lora_adapters_on_device", "Adapters in device slots.")
        self._in_memory = self._gauge("lora_adapters_in_memory", "Adapters in host memory.")
        self._loaded = self._gauge("lora_adapters_loaded", "Adapters that requests can use.")
        self._adapter_waiting = self._gauge(
            "lora_requests_waiting",
            "Requests that wait for their adapter to load, or for an adapter slot.",
        )
        self._reads = self._counter("lora_adapter_reads", "Adapters read into host memory.")

    def _grammar_metrics(self) -> None:
        self._grammars = self._gauge("grammars", "Grammars of structured outputs in the cache.")
        self._grammar_bytes = self._gauge("grammar_bytes", "Memory of compiled grammars.")
        self._grammar_waiting = self._gauge(
            "grammar_requests_waiting", "Requests whose grammar is being compiled."
        )
        self._compilations = self._counter(
            "grammar_compilations", "Grammar compilations in the sandbox, failed ones included."
        )
        self._refusals = self._counter(
            "grammar_refusals", "Grammars that were invalid or exceeded a limit."
        )

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
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of started requests.")
        self._cached = self._counter(
            "prompt_tokens_cached",
            "Prompt tokens of started requests that were found in the prefix cache.",
        )

    def _connection_metrics(self) -> None:
        self._connections = self._gauge("http_connections", "Open HTTP connections.")
        self._body_bytes = self._gauge(
            "http_buffered_body_bytes", "Bytes of request bodies in reception."
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
        name = f"{_PREFIX}inter_token_latency_seconds"
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
        self._num_prompt = histogram("request_prompt_tokens", "Prompt tokens.", _COUNTS)
        self._num_output = histogram("request_generation_tokens", "Generated tokens.", _COUNTS)
        self._param_max = histogram("request_params_max_tokens", "Requested max_tokens.", _COUNTS)
        self._param_n = histogram("request_params_n", "Requested n.", _FEW)

    def _gauge(self, name: str, help: str) -> Gauge:
        gauge = Gauge(_PREFIX + name, help, (_LABEL,), registry=self.registry)
        return gauge.labels(self._model_name)

    def _counter(self, name: str, help: str) -> Counter:
        counter = Counter(_PREFIX + name, help, (_LABEL,), registry=self.registry)
        return counter.labels(self._model_name)

    def _labelled(self, name: str, help: str, *labels: str) -> Counter:
        """A counter with labels beside the model's name."""
        return Counter(_PREFIX + name, help, (_LABEL, *labels), registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            _PREFIX + name, help, (_LABEL,), registry=self.registry, buckets=buckets
        )
        return histogram.labels(self._model_name)

    def render(self, engine_up: bool, sleep_level: int = 0) -> bytes:
        self._up.set(engine_up)
        for level, state in enumerate(_SLEEP_STATES):
            self._sleep.labels(self._model_name, state).set(level == sleep_level)
        return generate_latest(self.registry)

    # ---- engine ------------------------------------------------------------------------------

    def observe_stats(self, stats: EngineStats, last: EngineStats) -> None:
        """Add the difference of two stats of the engine; a new engine counts from zero."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._kv_usage.set(stats.num_used_blocks / max(1, stats.num_blocks))
        self._generated.inc(stats.num_generated_tokens - last.num_generated_tokens)
        self._preemptions.inc(stats.num_preemptions - last.num_preemptions)
        self._queries.inc(stats.prefix_queries - last.prefix_queries)
        self._hits.inc(stats.prefix_hits - last.prefix_hits)
        self._drafting.inc(stats.drafting_s - last.drafting_s)
        if stats.num_drafts > last.num_drafts:
            self._observe_drafts(stats, last)
        if stats.adapters is not None:
            self._observe_adapters(stats.adapters, last.adapters)
        if stats.grammars is not None:
            self._observe_grammars(stats.grammars, last.grammars)
        if stats.num_steps > last.num_steps:
            self._step_tokens.observe(stats.num_step_tokens)
            self._observe_executors(stats, last)

    def _observe_executors(self, stats: EngineStats, last: EngineStats) -> None:
        for name, count in stats.executors.items():
            added = count - last.executors.get(name, 0)
            self._executors.labels(self._model_name, name).inc(added)
        for name, reasons in stats.refusals.items():
            before = last.refusals.get(name, {})
            for reason, count in reasons.items():
                added = count - before.get(reason, 0)
                self._executor_refusals.labels(self._model_name, name, reason).inc(added)

    def _observe_adapters(self, stats: AdapterStats, last: AdapterStats | None) -> None:
        self._on_device.set(stats.num_resident)
        self._in_memory.set(stats.num_in_memory)
        self._loaded.set(stats.num_loaded)
        self._adapter_waiting.set(stats.num_waiting)
        self._reads.inc(stats.num_reads - (last.num_reads if last is not None else 0))

    def _observe_grammars(self, stats: GrammarStats, last: GrammarStats | None) -> None:
        self._grammars.set(stats.num_grammars)
        self._grammar_bytes.set(stats.num_bytes)
        self._grammar_waiting.set(stats.num_waiting)
        self._compilations.inc(stats.num_checks - (last.num_checks if last is not None else 0))
        self._refusals.inc(stats.num_refusals - (last.num_refusals if last is not None else 0))

    def _observe_drafts(self, stats: EngineStats, last: EngineStats) -> None:
        self._drafts.inc(stats.num_drafts - last.num_drafts)
        self._drafted.inc(stats.num_draft_tokens - last.num_draft_tokens)
        self._accepted.inc(stats.num_accepted_tokens - last.num_accepted_tokens)
        self._saved.inc(stats.num_saved_tokens - last.num_saved_tokens)
        self._length.set(1 + stats.num_accepted_tokens / stats.num_drafts)
        before = last.accepted_per_position
        for at, count in enumerate(stats.accepted_per_position):
            counted = before[at] if at < len(before) else 0
            self._accepted_at.labels(self._model_name, str(at)).inc(count - counted)

    # ---- connections -------------------------------------------------------------------------

    def watch_connections(
        self, num_open: Callable[[], float], num_body_bytes: Callable[[], float]
    ) -> None:
        """Read these values whenever the metrics are rendered."""
        self._connections.set_function(num_open)
        self._body_bytes.set_function(num_body_bytes)

    def connection_cut(self, reason: str) -> None:
        self._cuts.labels(self._model_name, reason).inc()

    # ---- requests ----------------------------------------------------------------------------

    def received(self) -> None:
        self._received.inc()
        self._in_flight.inc()

    def ended(self, outcome: Outcome) -> None:
        self._in_flight.dec()
        self._outcomes.labels(self._model_name, outcome).inc()

    def rejected(self, reason: str) -> None:
        self._rejections.labels(self._model_name, reason).inc()

    def params(self, n: int, max_tokens: int | None) -> None:
        self._param_n.observe(n)
        if max_tokens is not None:
            self._param_max.observe(max_tokens)

    def first_token(self, since_arrival_s: float, timeline: Timeline) -> None:
        self._ttft.observe(since_arrival_s)
        self._prompt.inc(timeline.num_prompt)
        self._cached.inc(timeline.num_cached)
        self._num_prompt.observe(timeline.num_prompt)
        if timeline.admitted is not None and timeline.first_token is not None:
            self._queue.observe(timeline.admitted - timeline.arrived)
            self._prefill.observe(timeline.first_token - timeline.admitted)

    def next_tokens(self, since_last_s: float, num_tokens: int) -> None:
        self._itl.observe(since_last_s / num_tokens, num_tokens)

    def finished(self, reason: str, *, num_tokens: int, decode_s: float, total_s: float) -> None:
        """Count a finished completion. Times are those of the HTTP process."""
        self._success.labels(self._model_name, reason).inc()
        self._num_output.observe(num_tokens)
        self._decode.observe(decode_s)
        self._e2e.observe(total_s)
        if num_tokens > 1:
            self._tpot.observe(decode_s / (num_tokens - 1))
