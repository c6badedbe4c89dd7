"""The chain of --fallback: the services of its models, beside those of the server's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast, overload

from windlass.config import ServeConfig
from windlass.core.card import ModelCard
from windlass.errors import ConfigError
from windlass.serve.admission import AdmissionControl
from windlass.serve.desk import RequestReporter
from windlass.serve.engine_reports import observe_engines
from windlass.serve.fallback import FallbackStep, Forecast
from windlass.serve.generation_services import (
    Fallbacks,
    FallbackTier,
    GenerationServices,
    make_generation_services,
)
from windlass.serve.handle import EngineHandle
from windlass.serve.live_config import LiveConfig
from windlass.serve.metrics import Metrics
from windlass.serve.trace_store import TraceStore

_S = TypeVar("_S", bound=GenerationServices)


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackEngine:
    """A step of --fallback at start; a step without a model has neither engine nor card."""

    step: FallbackStep
    client: EngineHandle | None = None
    card: ModelCard | None = None


def make_fallbacks(
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

    def __init__(
        self, steps: Sequence[FallbackStep], find: Callable[[str], GenerationServices]
    ) -> None:
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
    services: _S, steps: Sequence[FallbackStep], find: Callable[[str], GenerationServices]
) -> _S:
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
    observe_engines(client, metrics=metrics, admission=admission, traces=traces)
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
