"""The objects that the HTTP endpoints share, created once per server."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from windlass.config import ServeConfig
from windlass.core.card import ModelCard
from windlass.errors import ConfigError
from windlass.serve.adapter_manager import AdapterManager
from windlass.serve.admission import Admission, AdmissionControl
from windlass.serve.batch.service import BatchService, make_batch_service
from windlass.serve.charges import Charges
from windlass.serve.config_admin import ConfigAdmin, ConfigMetrics
from windlass.serve.cost import CostTracker, LiveCosts
from windlass.serve.engine_reports import observe_engines
from windlass.serve.fallback_chain import FallbackEngine, make_fallbacks
from windlass.serve.generation_services import GenerationServices, make_generation_services
from windlass.serve.handle import EngineHandle
from windlass.serve.health import Health
from windlass.serve.keys import Keys
from windlass.serve.live_config import LiveConfig, StartConfig
from windlass.serve.metrics import Metrics
from windlass.serve.prefixes import NamedPrefixes, PrefixFile
from windlass.serve.probe import GenerateProbe
from windlass.serve.reload import Reloads
from windlass.serve.request_log import RequestReports, SpanExporter
from windlass.serve.sleep import Sleeper
from windlass.serve.tenant_limits import TenantLimits
from windlass.serve.trace_store import TraceStore
from windlass.serve.usage import UsageMetrics, UsageStore, make_usage_store

_log = logging.getLogger("windlass.serve")


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
    observe_engines(client, metrics=metrics, admission=admission, traces=traces, costs=costs)
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
    fallbacks = make_fallbacks(fallback_engines, common, admission=admission, reporter=reports)
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


def _data_folder(config: ServeConfig) -> Path | None:
    return None if config.data_dir is None else Path(config.data_dir).expanduser()


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
