"""Passes on what the engines of a model report: to metrics, admission, costs and traces."""

from __future__ import annotations

from windlass.core.types import EngineStats
from windlass.serve.admission import AdmissionControl
from windlass.serve.cost import LiveCosts
from windlass.serve.handle import EngineHandle
from windlass.serve.metrics import Metrics
from windlass.serve.trace_store import TraceStore


def observe_engines(
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
