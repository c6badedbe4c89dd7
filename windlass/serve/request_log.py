"""Logs one line per request, and hands it to the exporter of traces.

A request is reported when the traces of its completions have arrived: with a success they are there,
those of an aborted completion come one step later.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import Any, Protocol

from windlass.core.trace import RequestTrace
from windlass.serve.cost import LiveCosts
from windlass.serve.live_config import LiveConfig
from windlass.serve.summary import RequestSummary
from windlass.serve.trace_store import Entry, TraceStore

_log = logging.getLogger("windlass.request")

_MAX_CHARS = 256  # of a text that the client chose
_DECIMALS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReport:
    """A request that has ended, with the traces of its completions that have arrived."""

    summary: RequestSummary
    traces: tuple[RequestTrace, ...] = ()
    replicas: tuple[int, ...] = ()
    cost_usd: float | None = None  # None: the server has no price
    trace_id: str = ""

    @property
    def queue_s(self) -> float | None:
        """The longest time that one of its completions was queued."""
        times = [each.timeline for each in self.traces]
        queued = [each.admitted - each.arrived for each in times if each.admitted is not None]
        return max(queued, default=None)


class SpanExporter(Protocol):
    """Exports a request as a trace."""

    def export(self, report: RequestReport) -> str:
        """Export the spans of a request; returns its trace id."""
        ...

    def close(self) -> None: ...


class RequestReports:
    """Owns the requests that have ended and wait for their traces."""

    def __init__(
        self,
        config: LiveConfig,
        traces: TraceStore,
        costs: LiveCosts,
        *,
        spans: SpanExporter | None,
    ) -> None:
        """`spans` None: traces are not exported."""
        self._config = config
        self._traces = traces
        self._costs = costs
        self._spans = spans
        self._waiting: dict[asyncio.Task[None], tuple[RequestSummary, Entry]] = {}

    @property
    def exports_traces(self) -> bool:
        return self._spans is not None

    @property
    def is_wanted(self) -> bool:
        """Whether requests are logged or traced now."""
        return self.exports_traces or self._config.value.logs_requests

    def report(self, summary: RequestSummary, entry: Entry | None) -> None:
        if entry is None or entry.closed.is_set():
            self._write(summary, entry)
            return
        task = asyncio.create_task(self._wait(entry))
        self._waiting[task] = summary, entry
        task.add_done_callback(self._write_waiting)

    async def _wait(self, entry: Entry) -> None:
        await self._traces.wait_closed(entry)

    def _write_waiting(self, task: asyncio.Task[None]) -> None:
        found = self._waiting.pop(task, None)
        if found is not None:
            self._write(*found)

    def _write(self, summary: RequestSummary, entry: Entry | None) -> None:
        traces = () if entry is None else tuple(entry.traces.values())
        tracker = self._costs.tracker
        report = RequestReport(
            summary=summary,
            traces=traces,
            replicas=() if entry is None else tuple(sorted(entry.replicas)),
            cost_usd=None if tracker is None else tracker.price.of(traces).total,
            trace_id=summary.trace_id,
        )
        if self._spans is not None:
            report = replace(report, trace_id=self._spans.export(report))
        if self._config.value.logs_requests:
            fields = fields_of(report)
            _log.info("%s", line_of(fields), extra={"fields": fields})

    def close(self) -> None:
        """Report what still waits, and export the last spans."""
        for task in list(self._waiting):
            self._write_waiting(task)
        if self._spans is not None:
            self._spans.close()


def fields_of(report: RequestReport) -> dict[str, Any]:
    """The fields of the line in JSON; unknown values are left out."""
    summary = report.summary
    fields: dict[str, Any] = {
        "id": summary.response_id,
        "client_request_id": summary.client_id,
        "trace_id": report.trace_id,
        "tenant": summary.tenant,
        "path": summary.path,
        "model": summary.model[:_MAX_CHARS],
        "adapter": summary.adapter,
        "fallback": summary.fallback,
        "fallback_model": summary.fallback_model,
        "user_agent": summary.user_agent,
        "batch": summary.is_batch or None,
        "stream": summary.stream,
        "status": summary.status,
        "outcome": summary.outcome,
        "reason": summary.reason,
        "prompt_tokens": summary.num_prompt,
        "cached_tokens": summary.num_cached,
        "output_tokens": summary.num_output,
        "draft_tokens": summary.num_drafted,
        "accepted_draft_tokens": summary.num_accepted,
        "queue_s": report.queue_s,
        "ttft_s": summary.ttft_s,
        "tpot_s": summary.tpot_s,
        "total_s": summary.ended - summary.began,
        "cost_usd": report.cost_usd,
        "replica": report.replicas[0] if len(report.replicas) == 1 else report.replicas,
        "request_body": summary.request_body.decode(errors="replace"),
        "response_body": summary.response_body.decode(errors="replace"),
    }
    return {
        name: round(value, _DECIMALS) if name.endswith("_s") else value
        for name, value in fields.items()
        if value not in (None, "", ())
    }


def line_of(fields: dict[str, Any]) -> str:
    """The line in words. Texts that the client chose are quoted, and their control characters escaped."""
    drafts = f", {fields['accepted_draft_tokens']} drafted" if fields["draft_tokens"] else ""
    parts = [
        f"{fields['path']}: {fields['status']} {fields['outcome']}: {fields.get('reason', '')}"
    ]
    if fields["prompt_tokens"]:
        parts.append(f"{fields['prompt_tokens']} prompt tokens ({fields['cached_tokens']} cached)")
        parts.append(f"{fields['output_tokens']} output tokens{drafts}")
    for name, words in _TIMES.items():
        if name in fields:
            parts.append(f"{words} {1e3 * fields[name]:.1f} ms")
    if "cost_usd" in fields:
        parts.append(f"${fields['cost_usd']:.6g}")
    parts += [f"{words} {fields[name]!r}" for name, words in _TEXTS.items() if name in fields]
    return ", ".join(parts)


_TIMES = {"queue_s": "queue", "ttft_s": "TTFT", "tpot_s": "TPOT", "total_s": "total"}
_TEXTS = {
    "id": "id",
    "client_request_id": "client's id",
    "trace_id": "trace",
    "tenant": "tenant",
    "model": "model",
    "adapter": "adapter",
    "fallback": "fallback due to",
    "fallback_model": "answered by",
    "replica": "replica",
    "request_body": "request",
    "response_body": "response",
}
