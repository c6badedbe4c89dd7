"""The parts of a server's HTTP side, made once and handed to the endpoints."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

from windlass.config import ServeConfig
from windlass.core.card import ModelCard
from windlass.core.types import EngineStats
from windlass.serve.adapters import AdapterDoor
from windlass.serve.admission import AdmissionControl
from windlass.serve.client import EngineClient
from windlass.serve.cost import CostBook, make_cost_book
from windlass.serve.desk import Desk
from windlass.serve.keys import Keys
from windlass.serve.metrics import Metrics
from windlass.serve.prepare import Preparer
from windlass.serve.probe import GenerateProbe
from windlass.serve.record import Recorder, make_recorder
from windlass.serve.sleep import Sleeper
from windlass.serve.trace_store import TraceStore
from windlass.serve.workers import Workers
from windlass.text.template_process import TemplateProcess
from windlass.text.template_worker import TemplateSource

_log = logging.getLogger("windlass.serve")


@dataclass(frozen=True, slots=True)
class Services:
    """What endpoints use. The engine behind `client` need not be running yet."""

    client: EngineClient
    card: ModelCard
    config: ServeConfig
    preparer: Preparer
    metrics: Metrics
    admission: AdmissionControl
    desk: Desk
    door: AdapterDoor
    traces: TraceStore
    sleeper: Sleeper
    probe: GenerateProbe
    workers: Workers
    template: TemplateProcess | None = None  # None: the model has no chat template
    costs: CostBook | None = None  # None: no price is known
    recorder: Recorder | None = None  # None: no traffic is recorded
    keys: Keys = field(default_factory=Keys)
    started: int = field(default_factory=lambda: int(time.time()))

    def close(self) -> None:
        """End threads, processes and files of the HTTP side."""
        self.workers.close()
        if self.template is not None:
            self.template.close()
        if self.recorder is not None:
            self.recorder.close()


def make_services(client: EngineClient, card: ModelCard, config: ServeConfig) -> Services:
    """Make the parts; a broken template or bad defaults are errors now, before a model is loaded."""
    keys = Keys.of(config)
    metrics = Metrics(card.name)
    admission = AdmissionControl(config, client, metrics.rejected)
    costs = make_cost_book(config.price_per_hour, card.name, metrics.registry)
    traces = TraceStore(costs.charge if costs is not None else lambda _owner, _trace: None)

    def on_stats(stats: EngineStats, last: EngineStats) -> None:
        metrics.observe_stats(stats, last)
        admission.observe(stats, last)
        if costs is not None:
            costs.observe(stats, last)

    client.on_stats = on_stats
    client.on_traces = traces.tell
    desk = Desk(metrics, config.enable_log_requests)
    recorder = make_recorder(config, card.tokenizer)
    workers, template = Workers(), _start_template(card, config)
    return Services(
        client=client,
        card=card,
        config=config,
        preparer=Preparer(
            card, config, template, workers, adapters=lambda: client.adapters.folders.keys()
        ),
        metrics=metrics,
        admission=admission,
        desk=desk,
        door=AdapterDoor(client, keys, config.lora_root, card.name),
        traces=traces,
        sleeper=Sleeper(client, desk),
        probe=GenerateProbe(client, card.tokenizer),
        workers=workers,
        template=template,
        costs=costs,
        recorder=recorder,
        keys=keys,
    )


def _start_template(card: ModelCard, config: ServeConfig) -> TemplateProcess | None:
    """The template that was asked for, or the model's own; tried, and its findings logged."""
    source = card.chat_template
    if config.chat_template is not None:
        source = Path(config.chat_template).read_text(encoding="utf-8")
    if source is None:
        _log.warning("%s has no chat template: only /v1/completions will answer", card.name)
        return None
    template = TemplateProcess(
        TemplateSource(source, dict(card.special_tokens), dict(config.default_chat_template_kwargs))
    )
    for fact in template.facts:
        _log.warning("%s", fact)
    return template
