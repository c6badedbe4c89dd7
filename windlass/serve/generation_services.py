"""What the endpoints that generate text need for one model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from windlass.config import ServeConfig
from windlass.core.card import Choice, EngineReport, ModelCard
from windlass.serve.admission import Admission
from windlass.serve.cost import Price
from windlass.serve.desk import Desk, RequestReporter
from windlass.serve.fallback import FallbackStep, Forecast
from windlass.serve.handle import EngineHandle, GenerationClient
from windlass.serve.keys import Keys
from windlass.serve.live_config import LiveConfig
from windlass.serve.metrics import Metrics
from windlass.serve.prepare import Preparer
from windlass.serve.record import Recorder, make_recorder
from windlass.serve.reload import Reloads
from windlass.serve.tenant_limits import Limits
from windlass.serve.trace_store import Traces
from windlass.serve.workers import Workers
from windlass.text.parsing.registry import choose_format
from windlass.text.scoring import ScoreTemplate, Scoring
from windlass.text.template_process import TemplateProcess
from windlass.text.template_worker import TemplateSource


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackTier:
    """A step of the chain of --fallback that can answer requests."""

    step: FallbackStep
    services: GenerationServices | None = None  # None: of the server's own model


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
