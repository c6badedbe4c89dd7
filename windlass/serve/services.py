"""The objects that the HTTP endpoints share, created once per server."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import cast, overload

from windlass.config import ServeConfig
from windlass.core.card import Choice, EngineReport, ModelCard
from windlass.core.types import EngineStats
from windlass.errors import ConfigError
from windlass.serve.adapter_manager import AdapterManager
from windlass.serve.admission import Admission, AdmissionControl
from windlass.serve.batch.service import BatchService, make_batch_service
from windlass.serve.charges import Charges
from windlass.serve.config_admin import ConfigAdmin, ConfigMetrics
from windlass.serve.cost import CostTracker, LiveCosts, Price
from windlass.serve.desk import Desk, RequestReporter
from windlass.serve.fallback import FallbackStep, Forecast
from windlass.serve.handle import EngineHandle, GenerationClient
from windlass.serve.health import Health
from windlass.serve.keys import Keys
from windlass.serve.live_config import LiveConfig, StartConfig
from windlass.serve.metrics import Metrics
from windlass.serve.prefixes import NamedPrefixes, PrefixFile
from windlass.serve.prepare import Preparer
from windlass.serve.probe import GenerateProbe
from windlass.serve.record import Recorder, make_recorder
from windlass.serve.reload import Reloads
from windlass.serve.request_log import RequestReports, SpanExporter
from windlass.serve.sleep import Sleeper
from windlass.serve.tenant_limits import Limits, TenantLimits
from windlass.serve.trace_store import Traces, TraceStore
from windlass.serve.usage import UsageMetrics, UsageStore, make_usage_store
from windlass.serve.workers import Workers
from windlass.text.parsing.registry import choose_format
from windlass.text.scoring import ScoreTemplate, Scoring
from windlass.text.template_process import TemplateProcess
from windlass.text.template_worker import TemplateSource

_log = logging.getLogger("windlass.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackTier:
    """A step of the chain of --fallback that can answer requests."""

    step: FallbackStep
    services: GenerationServices | None = None  # None: of the server's own model


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackEngine:
    """A step of --fallback at start; a step without a model has neither engine nor card."""

    step: FallbackStep
    client: EngineHandle | None = None
    card: ModelCard | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallbacks:
    """The chain of --fallback."""

    tiers: Sequence[FallbackTier]
    # Called with a number of requests: how they would fare with the own model, and with each tier.
    forecast: Callable[[int], Awaitable[Sequence[Forecast]]]
    is_shared: bool = False  # its models answer their own requests, too, and are closed elsewhere

    @property
    def engines(self) -> dict[str, EngineHandle]:
        """Of the models of the chain, by name; not in an HTTP worker."""
        models = (tier.services for tier in self.tiers)
        return {
            each.card.name: cast("EngineHandle", each.client) for each in models if each is not None
        }

    def choices(self) -> list[Choice]:
        """Lines of the start-up table; the engines are ready."""
        return [
            Choice("fallback", name, "; ".join(_facts(each.report)))
            for name, each in self.engines.items()
        ]

    def close(self) -> None:
        for tier in () if self.is_shared else self.tiers:
            if tier.services is not None:
                tier.services.close()


def _facts(report: EngineReport) -> Iterator[str]:
    """What the start-up table says of a model of --fallback."""
    yield f"{report.capacity.num_blocks} KV blocks: {report.capacity.reason}"
    for choice in report.choices:
        if choice.what == "threads":
            yield f"{choice.value} threads: {choice.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationServices:
    """Dependencies of the endpoints that generate text, in the server's process or an HTTP worker."""

    client: GenerationClient
    card: ModelCard
    live: LiveConfig
    preparer: Preparer
    metrics: Metrics
    admission: Admission
    desk: Desk
    traces: Traces
    limits: Limits
    workers: Workers
    reloads: Reloads
    scoring: Scoring
    template: TemplateProcess | None = None  # None: the model has no chat template
    num_replicas: int = 1
    recorder: Recorder | None = None  # None: no traffic is recorded
    keys: Keys = field(default_factory=Keys)
    fallbacks: Fallbacks | None = None  # None: no --fallback
    shares_strikes: bool = False  # with other models, which clients may name, too
    choices: tuple[Choice, ...] = ()  # for the start-up table

    @property
    def config(self) -> ServeConfig:
        """The current config, which a request may read once."""
        return self.live.value

    @property
    def price(self) -> Price | None:
        """The current price; None: no --price-per-hour."""
        per_hour = self.config.price_per_hour
        return None if per_hour is None else Price(per_hour, self.num_replicas)

    def close(self) -> None:
        """Stop the threads and the template process, and close files."""
        self.workers.close()
        if self.template is not None:
            self.template.close()
        if self.recorder is not None:
            self.recorder.close()
        if self.fallbacks is not None:
            self.fallbacks.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Services(GenerationServices):
    """Dependencies of all endpoints. The engine behind `client` need not be running yet."""

    client: EngineHandle
    traces: TraceStore
    limits: TenantLimits
    adapter_manager: AdapterManager
    sleeper: Sleeper
    probes: list[GenerateProbe]  # one per replica
    live_costs: LiveCosts
    config_admin: ConfigAdmin
    prefixes: NamedPrefixes
    reports: RequestReports
    batches: BatchService | None = None  # None: no --data-dir
    usage: UsageStore | None = None  # None: no --usage-db, and no keys or no --data-dir
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def costs(self) -> CostTracker | None:
        """The costs; None: no --price-per-hour."""
        return self.live_costs.tracker

    @property
    def engines(self) -> list[tuple[EngineHandle, Admission]]:
        """The engines of all models with their queues: the server's own, then those of --fallback."""
        tiers = () if self.fallbacks is None else self.fallbacks.tiers
        others = [each.services for each in tiers if each.services is not None]
        clients = {} if self.fallbacks is None else self.fallbacks.engines
        found = [(clients[each.card.name], each.admission) for each in others]
        return [(self.client, self.admission), *found]

    def readiness(self) -> Health:
        """Whether a request would be answered now."""
        if self.desk.draining:
            return Health(False, "the server is shutting down")
        state = self.sleeper.state
        if state != "awake":
            return Health(False, f"the server is {state}; POST /admin/wake wakes it", "sleeping")
        health = self.client.health()
        if not health.ok and self.fallbacks is not None:
            others = [each.health() for each in self.fallbacks.engines.values()]
            if any(each.ok for each in others):
                return Health(True, f"{health.reason}; --fallback answers", "degraded")
        return health

    def close(self) -> None:
        GenerationServices.close(self)
        self.prefixes.close()
        self.reports.close()
        if self.batches is not None:
            self.batches.close()
        if self.usage is not None:
            self.usage.close()


def make_services(
    client: EngineHandle,
    card: ModelCard,
    live: LiveConfig,
    *,
    reloads: Reloads,
    started: StartConfig,
    fallback_engines: Sequence[FallbackEngine] = (),
) -> Services:
    """Create the services; a broken template or bad defaults raise before a model is loaded."""
    config = live.value
    metrics = Metrics(
        card.name,
        len(client.replicas),
        prefix=config.metrics_prefix,
        max_tenants=config.max_metric_tenants,
    )
    admission = AdmissionControl(live, client, metrics.rejected)
    costs = LiveCosts(card.name, metrics.registry, len(client.replicas))
    live.watch(lambda config: costs.set_price(config.price_per_hour))
    config = live.value
    keys = Keys.of(config)
    if config.keys_file is not None:
        reloads.add("keys file", keys.reload)
    usage = make_usage_store(config, keys.are_needed)
    if usage is not None:
        metrics.registry.register(UsageMetrics(usage, card.name))
    limits = TenantLimits(usage, metrics.rejected)
    traces = TraceStore(Charges(costs, usage, limits, model=card.name).charge)
    _observe(client, metrics=metrics, admission=admission, traces=traces, costs=costs)
    reports = _make_reports(live, traces, costs)
    common = make_generation_services(
        client,
        card,
        live,
        metrics=metrics,
        admission=admission,
        traces=traces,
        num_replicas=len(client.replicas),
        keys=keys,
        limits=limits,
        reloads=reloads,
        reporter=reports,
    )
    for engine in fallback_engines:
        if engine.client is not None:
            # A request that has ended an engine must not end those of the chain.
            engine.client.suspects = client.suspects
    fallbacks = _make_fallbacks(fallback_engines, common, admission=admission, reporter=reports)
    common = replace(common, fallbacks=fallbacks)
    if common.template is None:
        _log.warning("%s has no chat template: only /v1/completions is available", card.name)
    for warning in () if common.template is None else common.template.warnings:
        _log.warning("%s", warning)
    try:
        return Services(
            **{each.name: getattr(common, each.name) for each in fields(common)},
            adapter_manager=AdapterManager(client, config.lora_root, (card.name, *card.aliases)),
            sleeper=Sleeper(
                (client, *(() if fallbacks is None else fallbacks.engines.values())), common.desk
            ),
            probes=[GenerateProbe(replica, card.tokenizer) for replica in client.replicas],
            live_costs=costs,
            config_admin=_config_admin(
                live, started, client, metrics=metrics, card=card, keys=keys
            ),
            prefixes=NamedPrefixes(client, card.name, PrefixFile(_data_folder(config))),
            batches=make_batch_service(live, common.preparer),
            reports=reports,
            usage=usage,
        )
    except BaseException:
        common.close()  # ends the template processes
        reports.close()
        if usage is not None:
            usage.close()
        raise


def _observe(
    client: EngineHandle,
    *,
    metrics: Metrics,
    admission: AdmissionControl,
    traces: TraceStore,
    costs: LiveCosts | None = None,
) -> None:
    """Pass on what the engines of a model report."""
    metrics.watch_engines(client.replicas)
    if client.handovers is not None:
        client.handovers.on_result = metrics.handover

    def on_stats(replica: int, stats: EngineStats, last: EngineStats) -> None:
        metrics.observe_stats(stats, last, replica)
        admission.observe(stats, last)
        if costs is not None:
            costs.observe(stats, last, replica)

    client.on_stats = on_stats
    client.on_traces = lambda replica, arrived: traces.add(arrived, replica)
    client.on_traces_lost = traces.lose


def _data_folder(config: ServeConfig) -> Path | None:
    return None if config.data_dir is None else Path(config.data_dir).expanduser()


def _make_fallbacks(
    engines: Sequence[FallbackEngine],
    own: GenerationServices,
    *,
    admission: AdmissionControl,
    reporter: RequestReporter,
) -> Fallbacks | None:
    """Create the chain of --fallback; None: it is empty."""
    if not engines:
        return None
    tiers: list[FallbackTier] = []
    queues = [admission]
    names = {own.card.name, *own.card.aliases}
    for engine in engines:
        if engine.client is None or engine.card is None:
            tiers.append(FallbackTier(step=engine.step))
            queues.append(admission)
            continue
        card = engine.card
        if names & {card.name, *card.aliases}:
            raise ConfigError(
                f"--fallback {engine.step.text!r} has the name {card.name!r} of another model here; a "
                "client could not see which one answered. Add served_model_name=NAME to its options."
            )
        names |= {card.name, *card.aliases}
        services = _make_tier_services(engine.client, card, own=own, reporter=reporter)
        assert isinstance(services.admission, AdmissionControl)
        tiers.append(FallbackTier(step=engine.step, services=services))
        queues.append(services.admission)

    async def forecast(num_requests: int) -> list[Forecast]:
        return [each.forecast(num_requests) for each in queues]

    return Fallbacks(tiers=tiers, forecast=forecast)


class _SharedTiers(Sequence[FallbackTier]):
    """A chain of models that this process serves, too: their services may change at any time."""

    def __init__(self, steps: Sequence[FallbackStep], find: Callable[[str], Services]) -> None:
        self._steps = steps
        self._find = find

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, index: int) -> FallbackTier: ...

    @overload
    def __getitem__(self, index: slice) -> list[FallbackTier]: ...

    def __getitem__(self, index: int | slice) -> FallbackTier | list[FallbackTier]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        step = self._steps[index]
        services = None if step.model is None else self._find(step.model)
        return FallbackTier(step=step, services=services)


def with_fallbacks(
    services: Services, steps: Sequence[FallbackStep], find: Callable[[str], Services]
) -> Services:
    """The services with a chain of other models that this process serves, too.

    `find` returns the services of a model, for each request anew.
    """
    tiers = _SharedTiers(steps, find)

    async def forecast(num_requests: int) -> list[Forecast]:
        queues = [services.admission, *((each.services or services).admission for each in tiers)]
        return [cast("AdmissionControl", each).forecast(num_requests) for each in queues]

    chain = Fallbacks(tiers=tiers, forecast=forecast, is_shared=True)
    return replace(services, fallbacks=chain)


def _make_tier_services(
    client: EngineHandle,
    card: ModelCard,
    *,
    own: GenerationServices,
    reporter: RequestReporter,
) -> GenerationServices:
    """Create the services of a model of --fallback, with its own template, tokenizer and queue."""
    assert isinstance(own.traces, TraceStore)
    traces, live = own.traces, tier_config(own.live)
    metrics = Metrics(card.name, len(client.replicas), max_tenants=own.config.max_metric_tenants)
    own.metrics.add_model(metrics, lambda: [each.health().ok for each in client.replicas])
    admission = AdmissionControl(live, client, metrics.rejected)
    _observe(client, metrics=metrics, admission=admission, traces=traces)
    return make_generation_services(
        client,
        card,
        live,
        metrics=metrics,
        admission=admission,
        traces=traces,
        num_replicas=len(client.replicas),
        keys=own.keys,
        limits=own.limits,
        reloads=own.reloads,
        reporter=reporter,
    )


def tier_config(own: LiveConfig) -> LiveConfig:
    """The config of a model of --fallback, which follows that of the server."""
    live = LiveConfig(_fallback_config(own.value))
    own.watch(lambda config: live.set(_fallback_config(config)))
    return live


def _fallback_config(config: ServeConfig) -> ServeConfig:
    """The server's config without the options of its own model."""
    return replace(
        config,
        chat_template=None,
        score_template=None,
        default_chat_template_kwargs={},
        tool_call_parser="auto",
        reasoning_parser="auto",
        slo_admission=False,
    )


def _config_admin(
    live: LiveConfig,
    started: StartConfig,
    client: EngineHandle,
    *,
    metrics: Metrics,
    card: ModelCard,
    keys: Keys,
) -> ConfigAdmin:
    live.watch(keys.use_config)
    admin = ConfigAdmin(live, started, client, check=keys.check_config)
    metrics.registry.register(ConfigMetrics(admin, card.name))
    return admin


def _make_reports(live: LiveConfig, traces: TraceStore, costs: LiveCosts) -> RequestReports:
    """Create what logs and exports requests."""
    if live.value.log_bodies:
        _log.warning(
            "--log-bodies: the log has the prompts and outputs of all clients; protect it as such"
        )
    return RequestReports(live, traces, costs, spans=_make_spans(live.value))


def _make_spans(config: ServeConfig) -> SpanExporter | None:
    """Create the exporter of traces; None: neither flag nor environment ask for one."""
    flag = config.otlp_traces_endpoint
    variables = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    from_environment = next((name for name in variables if os.environ.get(name)), None)
    if flag is None and from_environment is None:
        return None
    try:
        from windlass.serve.otel import make_spans
    except ModuleNotFoundError as error:
        needed = "needs OpenTelemetry. Install it with: pip install 'windlass-llm[otel]'"
        if flag is not None:
            raise ConfigError(f"--otlp-traces-endpoint {needed} ({error}).") from error
        # A cluster may set the variable for all its programs.
        _log.warning("no traces are exported: %s %s", from_environment, needed)
        return None
    return make_spans(flag)


def make_generation_services(
    client: GenerationClient,
    card: ModelCard,
    live: LiveConfig,
    *,
    metrics: Metrics,
    admission: Admission,
    traces: Traces,
    keys: Keys,
    limits: Limits,
    num_replicas: int,
    reloads: Reloads,
    reporter: RequestReporter,
) -> GenerationServices:
    """Create the services of the endpoints that generate text; starts the template process."""
    config = live.value
    recorder = make_recorder(live, card.tokenizer)
    workers, source = Workers(), _template_source(card, config)
    output_format = None
    if source is not None:
        output_format = choose_format(source, config.tool_call_parser, config.reasoning_parser)
    template = _start_template(source, card, config)
    return GenerationServices(
        client=client,
        card=card,
        live=live,
        preparer=Preparer(
            card=card,
            config=live,
            template=template,
            workers=workers,
            output_format=output_format,
            adapters=lambda: client.adapter_names,
        ),
        metrics=metrics,
        admission=admission,
        desk=Desk(metrics, live, reporter),
        traces=traces,
        limits=limits,
        workers=workers,
        scoring=_scoring(card, config),
        template=template,
        num_replicas=num_replicas,
        recorder=recorder,
        keys=keys,
        reloads=reloads,
        choices=(
            _sampling_choice(card),
            _pooling_choice(card),
            *(() if output_format is None else output_format.choices),
        ),
    )


def _sampling_choice(card: ModelCard) -> Choice:
    values = ", ".join(f"{name} {value}" for name, value in card.default_sampling.items())
    return Choice("sampling", values or "temperature 1", "default of requests that do not set it")


def _pooling_choice(card: ModelCard) -> Choice:
    pooling = card.pooling
    if pooling.why_not:
        return Choice("pooling", "none", "--task generate")
    value = "scores" if pooling.task == "classify" else f"embeddings of {pooling.size:,} numbers"
    unit = ", unit length" if pooling.task == "embed" and pooling.normalize else ""
    return Choice("pooling", f"{value}, {pooling.pooling_type}{unit}", pooling.reason)


def _scoring(card: ModelCard, config: ServeConfig) -> Scoring:
    path = config.score_template
    return Scoring(card, None if path is None else ScoreTemplate(path))


def _template_source(card: ModelCard, config: ServeConfig) -> str | None:
    """The text of --chat-template, or of the model's own template."""
    if config.chat_template is not None:
        return Path(config.chat_template).read_text(encoding="utf-8")
    return card.chat_template


def _start_template(
    source: str | None, card: ModelCard, config: ServeConfig
) -> TemplateProcess | None:
    """Start the process that renders the template; None: the model has none."""
    if source is None:
        return None
    return TemplateProcess(
        TemplateSource(source, dict(card.special_tokens), dict(config.default_chat_template_kwargs))
    )
