"""Prometheus metrics of one replica, from differences between the stats of its engine process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from windlass.core.card import EngineReport
from windlass.core.trace import BLOCKERS, NEXT_STEP
from windlass.core.types import AdapterStats, EngineStats, ExpertStats, GrammarStats, SloStats
from windlass.serve.tier_metrics import TierMetrics
from windlass.serve.vllm_metrics import PREFIX

T = TypeVar("T", bound=MetricWrapperBase)

COUNTS = tuple(2.0**i for i in range(18))
_MAX_NAMES = 100  # adapter names in one label
_REASONS = {each: each.replace(" ", "_") for each in (*BLOCKERS, NEXT_STEP)}


class EngineState(Protocol):
    """What the server knows of an engine without its stats."""

    num_ends: int  # processes that died or hung

    @property
    def report(self) -> EngineReport: ...


class EngineFamilies:
    """The metrics of all replicas, which differ in their label `replica`; one engine has no such label."""

    def __init__(self, registry: CollectorRegistry, model_name: str, num_replicas: int) -> None:
        self.registry = registry
        self.labels = ("model_name", "replica")[: 1 + (num_replicas > 1)]
        self._model_name = model_name
        self._made: dict[str, MetricWrapperBase] = {}

    def values(self, replica: int) -> tuple[str, ...]:
        """The values of the labels."""
        return (self._model_name, str(replica))[: len(self.labels)]

    def get(self, kind: type[T], name: str, make: Callable[[], T]) -> T:
        """The metric of this name; the first replica makes it."""
        if name not in self._made:
            self._made[name] = make()
        metric = self._made[name]
        assert isinstance(metric, kind)
        return metric


class _Info:
    """A gauge whose labels are the information: only the current ones are shown."""

    def __init__(self, gauge: Gauge, labels: tuple[str, ...]) -> None:
        self._gauge = gauge
        self._labels = labels
        self._shown: tuple[str, ...] | None = None

    def show(self, *values: object) -> Gauge:
        """Replace the labels; the caller sets the value."""
        labels = *self._labels, *map(str, values)
        if self._shown not in (None, labels):
            self._gauge.remove(*self._shown)
        self._shown = labels
        return self._gauge.labels(*labels)


class EngineMetrics:
    """The metrics of one replica."""

    def __init__(self, families: EngineFamilies, replica: int) -> None:
        self._families = families
        self._labels = families.values(replica)
        self._process_metrics()
        self._engine_metrics()
        self._draft_metrics()
        self._expert_metrics()
        self._adapter_metrics()
        self._grammar_metrics()
        self._slo_metrics()
        self._tiers = TierMetrics(gauges=self._gauges, counters=self._labelled, labels=self._labels)

    def _process_metrics(self) -> None:
        self.up = self._gauge("engine_up", "1 if the engine process is healthy, else 0.")
        self._restarts = self._counter(
            "engine_restarts", "Engine processes that died or hung and were to be restarted."
        )
        self._num_ends = 0
        info = self._gauges(
            "cache_config_info",
            "1, with the sizes of the KV cache as labels.",
            "block_size",
            "num_gpu_blocks",
            "bytes_per_block",
            "enable_prefix_caching",
        )
        self._cache_config = _Info(info, self._labels)

    def _engine_metrics(self) -> None:
        self._running = self._gauge("num_requests_running", "Running requests.")
        self._waiting = self._gauge("num_requests_waiting", "Requests in the queue.")
        self._waiting_for = self._gauges(
            "num_requests_waiting_by_reason",
            "Requests in the queue by what blocked them in the last plan.",
            "reason",
        )
        self._fairness = self._gauge(
            "tenant_fairness_jain",
            "Jain's index of the recent service by weight of tenants with queued requests; 1 is equal.",
        )
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
        self._kv_blocks = self._gauges(
            "kv_cache_blocks", "KV blocks: used, cached (free and reusable), or free.", "state"
        )
        self._pinned = self._gauge(
            "kv_cache_pinned_blocks", "KV blocks of named prefixes, which are not evicted."
        )
        self._generated = self._counter("generation_tokens", "Tokens generated.")
        self._preemptions = self._counter(
            "num_preemptions", "Running requests that were preempted."
        )
        self._queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._computed = self._counter(
            "prompt_tokens_computed", "Prompt tokens that steps have computed."
        )
        self._seconds = self._labelled(
            "engine_seconds",
            "Engine time by phase: prefill, decode or idle; the phases sum up to its uptime.",
            "phase",
        )
        self._step_tokens = self._histogram(
            "iteration_tokens_total",
            "Tokens per step, sampled at most ten times per second.",
            COUNTS,
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
        self._deadlines = self._labelled(
            "deadlines_exceeded",
            "Requests that ended at their deadline, by phase; predicted: dropped from the queue, since "
            "they could not have met it.",
            "phase",
        )

    def _draft_metrics(self) -> None:
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

    def _expert_metrics(self) -> None:
        self._expert_imbalance = self._gauges(
            "expert_imbalance",
            "Tokens of a layer's most chosen expert over the mean of its experts, since the start.",
            "layer",
        )
        self._rank_imbalance = self._gauges(
            "expert_rank_imbalance",
            "Tokens of a layer's busiest rank over the mean of its ranks, since the start.",
            "layer",
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
        info = self._gauges(
            "lora_requests_info",
            "The time of the last stats, with the adapters of running and queued requests as labels.",
            "max_lora",
            "running_lora_adapters",
            "waiting_lora_adapters",
        )
        self._lora_info = _Info(info, self._labels)

    def _slo_metrics(self) -> None:
        self._slo_limits = self._gauges(
            "slo_limit", "Limits that the SLO controller sets now, per step.", "limit"
        )
        self._slo_changes = self._labelled(
            "slo_limit_changes", "Changes of limits by the SLO controller.", "reason"
        )
        self._slo_rate = self._gauges(
            "slo_prompt_tokens_per_second", "Prompt tokens per second within the current limits."
        )
        self._slo_possible = self._gauges(
            "slo_tpot_possible", "1 if the TPOT target can be met, 0 if not even by short steps."
        )

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

    def _gauge(self, name: str, help: str) -> Gauge:
        return self._gauges(name, help).labels(*self._labels)

    def _gauges(self, name: str, help: str, *labels: str) -> Gauge:
        """A gauge with further labels."""
        families = self._families
        labels = *families.labels, *labels
        make = partial(Gauge, PREFIX + name, help, labels, registry=families.registry)
        return families.get(Gauge, name, make)

    def _counter(self, name: str, help: str) -> Counter:
        return self._labelled(name, help).labels(*self._labels)

    def _labelled(self, name: str, help: str, *labels: str) -> Counter:
        """A counter with further labels."""
        families = self._families
        labels = *families.labels, *labels
        make = partial(Counter, PREFIX + name, help, labels, registry=families.registry)
        return families.get(Counter, name, make)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        families = self._families
        make = partial(
            Histogram,
            PREFIX + name,
            help,
            families.labels,
            registry=families.registry,
            buckets=buckets,
        )
        return families.get(Histogram, name, make).labels(*self._labels)

    def observe_process(self, state: EngineState) -> None:
        """Show the engine's process as it is now."""
        self._restarts.inc(state.num_ends - self._num_ends)
        self._num_ends = state.num_ends
        report = state.report
        capacity = report.capacity
        values = capacity.block_size, capacity.num_blocks, capacity.bytes_per_block
        self._cache_config.show(*values, report.prefix_caching).set(1)

    def observe_down(self) -> None:
        """Show that an engine that is down runs nothing."""
        self._observe_state(EngineStats())

    def _observe_state(self, stats: EngineStats) -> None:
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        for reason, label in _REASONS.items():
            count = stats.waiting_by_reason.get(reason, 0)
            self._waiting_for.labels(*self._labels, label).set(count)
        self._fairness.set(stats.tenant_fairness)
        self._kv_usage.set(stats.num_used_blocks / max(1, stats.num_blocks))
        self._pinned.set(stats.num_pinned_blocks)
        num_free = stats.num_blocks - stats.num_used_blocks - stats.num_cached_blocks
        blocks = {"used": stats.num_used_blocks, "cached": stats.num_cached_blocks}
        for state, count in {**blocks, "free": num_free}.items():
            self._kv_blocks.labels(*self._labels, state).set(count)

    def observe(self, stats: EngineStats, last: EngineStats) -> None:
        """Add the difference of two stats of the engine; a new engine counts from zero."""
        self._observe_state(stats)
        self._computed.inc(stats.num_prompt_tokens_computed - last.num_prompt_tokens_computed)
        for phase in ("prefill", "decode", "idle"):
            seconds = getattr(stats.account, f"{phase}_s") - getattr(last.account, f"{phase}_s")
            # Rounding can make differences of long sums slightly negative.
            self._seconds.labels(*self._labels, phase).inc(max(0.0, seconds))
        self._generated.inc(stats.num_generated_tokens - last.num_generated_tokens)
        self._preemptions.inc(stats.num_preemptions - last.num_preemptions)
        self._queries.inc(stats.prefix_queries - last.prefix_queries)
        self._hits.inc(stats.prefix_hits - last.prefix_hits)
        self._drafting.inc(stats.drafting_s - last.drafting_s)
        for phase, count in stats.deadlines.items():
            added = count - last.deadlines.get(phase, 0)
            self._deadlines.labels(*self._labels, phase).inc(added)
        if stats.slo is not None:
            self._observe_slo(stats.slo, last.slo)
        elif last.slo is not None:  # the targets were removed
            for gauge in (self._slo_limits, self._slo_rate, self._slo_possible):
                gauge.clear()
        if stats.num_drafts > last.num_drafts:
            self._observe_drafts(stats, last)
        if stats.adapters is not None:
            self._observe_adapters(stats.adapters, last.adapters)
        if stats.grammars is not None:
            self._observe_grammars(stats.grammars, last.grammars)
        if stats.tiers:
            self._tiers.observe(stats, last)
        if stats.experts is not None and stats.experts != last.experts:
            self._observe_experts(stats.experts)
        if stats.num_steps > last.num_steps:
            self._step_tokens.observe(stats.num_step_tokens)
            self._observe_executors(stats, last)

    def _observe_executors(self, stats: EngineStats, last: EngineStats) -> None:
        for name, count in stats.executors.items():
            added = count - last.executors.get(name, 0)
            self._executors.labels(*self._labels, name).inc(added)
        for name, reasons in stats.refusals.items():
            before = last.refusals.get(name, {})
            for reason, count in reasons.items():
                added = count - before.get(reason, 0)
                self._executor_refusals.labels(*self._labels, name, reason).inc(added)

    def _observe_slo(self, stats: SloStats, last: SloStats | None) -> None:
        limits = {"prompt_tokens": stats.num_prompt_tokens, "running": stats.num_running}
        if stats.draft_length is not None:
            limits["draft_tokens"] = stats.draft_length
        for name, value in limits.items():
            self._slo_limits.labels(*self._labels, name).set(value)
        self._slo_rate.labels(*self._labels).set(stats.prompt_tokens_per_s)
        self._slo_possible.labels(*self._labels).set(stats.is_possible)
        before = {} if last is None else last.changes
        for reason, count in stats.changes.items():
            self._slo_changes.labels(*self._labels, reason).inc(count - before.get(reason, 0))

    def _observe_experts(self, stats: ExpertStats) -> None:
        for layer, value in stats.expert_imbalance.items():
            self._expert_imbalance.labels(*self._labels, str(layer)).set(value)
        for layer, value in stats.rank_imbalance.items():
            self._rank_imbalance.labels(*self._labels, str(layer)).set(value)

    def _observe_adapters(self, stats: AdapterStats, last: AdapterStats | None) -> None:
        self._on_device.set(stats.num_resident)
        self._in_memory.set(stats.num_in_memory)
        self._loaded.set(stats.num_loaded)
        self._adapter_waiting.set(stats.num_waiting)
        self._reads.inc(stats.num_reads - (last.num_reads if last is not None else 0))
        names = (",".join(each[:_MAX_NAMES]) for each in (stats.running, stats.waiting))
        self._lora_info.show(stats.num_slots, *names).set_to_current_time()

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
            self._accepted_at.labels(*self._labels, str(at)).inc(count - counted)
