"""Exports requests as OpenTelemetry traces: a span per request, with a child span per phase.

Spans are made when a request has ended. A thread of the SDK sends them; its queue is bounded, and a
collector that does not answer costs requests nothing. Needs the extra `otel`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from windlass.core.trace import BLOCKERS, RequestTrace
from windlass.errors import ConfigError
from windlass.serve.request_log import RequestReport
from windlass.version import __version__

_log = logging.getLogger("windlass.serve")

_TRACES_PATH = "/v1/traces"
_MAX_TRACED_COMPLETIONS = 16  # with spans of their own; a request of embeddings has up to 2,048
_MAX_CHARS = 256  # of a text that the client chose
_CLOSE_S = 3.0  # for the last spans
_EXPORTER_LOG = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
_QUEUE_LOG = "opentelemetry.sdk._shared_internal"

Attributes = dict[str, Any]


def endpoint_of(flag: str | None, environment: Mapping[str, str]) -> str | None:
    """The URL that traces are sent to; None: they are not exported.

    The flag or OTEL_EXPORTER_OTLP_ENDPOINT name a collector; OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is a
    whole URL.
    """
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    traces = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    common = environment.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if flag is None and environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return None
    if flag is not None:
        url, name = flag, "--otlp-traces-endpoint"
    elif traces:
        url, name = traces, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
    elif common:
        url, name = f"{common.rstrip('/')}{_TRACES_PATH}", "OTEL_EXPORTER_OTLP_ENDPOINT"
    else:
        return None
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"{name} must be the http or https URL of a collector, for example "
            f"http://localhost:4318{_TRACES_PATH}; got {url!r}."
        )
    for variable in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = environment.get(variable)
        if protocol and protocol != "http/protobuf":
            raise ConfigError(
                f"{variable} is {protocol!r}: this server exports http/protobuf. Unset it, and use the "
                "collector's HTTP port (4318)."
            )
    return parts._replace(path=_TRACES_PATH).geturl() if parts.path in ("", "/") else url


def without_password(url: str) -> str:
    """A URL for the log: without user and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


class _Exporter(SpanExporter):
    """Sends spans, and logs once that the collector fails, and once that it is back."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = without_password(endpoint)
        self._inner = OTLPSpanExporter(endpoint)
        self._is_failing = False
        self._reason = "no reason given"
        exporter_log = logging.getLogger(_EXPORTER_LOG)
        exporter_log.filters = [self._keep_reason]
        logging.getLogger(_QUEUE_LOG).setLevel(logging.ERROR)  # it warns for each dropped span

    def _keep_reason(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if "due to timeout" not in message:  # that follows a line with the reason
            self._reason = message
        return False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._inner.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if failed and not self._is_failing:
            _log.warning("traces are lost: %s does not take them: %s", self._endpoint, self._reason)
        if self._is_failing and not failed:
            _log.warning("traces are exported to %s again", self._endpoint)
        self._is_failing = failed
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()  # type: ignore[no-untyped-call]


class RequestSpans:
    """Owns the exporter and its thread."""

    def __init__(self, endpoint: str) -> None:
        self._exporter = _Exporter(endpoint)
        # The variables OTEL_* set its sampler, limits and queue.
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("windlass", __version__)
        self._propagator = TraceContextTextMapPropagator()
        _log.info("traces are exported to %s", without_password(endpoint))

    def export(self, report: RequestReport) -> str:
        """Queue the spans of a request; returns its trace id."""
        summary, clock = report.summary, _Clock()
        headers = {"traceparent": summary.traceparent, "tracestate": summary.tracestate}
        root = self._tracer.start_span(
            _name_of(report),
            self._propagator.extract(headers, Context()),
            SpanKind.SERVER,
            attributes=_attributes(report),
            start_time=clock.ns(summary.began),
        )
        if root.is_recording():
            if summary.outcome == "error":
                root.set_status(Status(StatusCode.ERROR, summary.reason))
            self._add_phases(report, root, clock)
        root.end(clock.ns(summary.ended))
        return format_trace_id(root.get_span_context().trace_id)

    def _add_phases(self, report: RequestReport, root: Span, clock: _Clock) -> None:
        parent = set_span_in_context(root, Context())
        for name, start, end, attributes in _phases(report):
            span = self._tracer.start_span(
                name, parent, attributes=attributes, start_time=clock.ns(start)
            )
            span.end(clock.ns(max(start, end)))

    def close(self) -> None:
        """Send the last spans, for a short time."""
        flush = threading.Thread(target=self._provider.shutdown, daemon=True)
        flush.start()
        flush.join(_CLOSE_S)
        if flush.is_alive():
            self._exporter.shutdown()  # ends the pauses between its attempts


class _Clock:
    """Converts times of the monotonic clock to nanoseconds since 1970."""

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.monotonic_ns()

    def ns(self, seconds: float) -> int:
        return int(seconds * 1e9) + self._offset


def _resource() -> Resource:
    """Who exports; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence."""
    own = Resource.create({"service.name": "windlass", "service.version": __version__})
    return own.merge(OTELResourceDetector().detect())


def _name_of(report: RequestReport) -> str:
    """As the conventions for generative AI say; a body that was not read has only a path."""
    summary = report.summary
    if not summary.operation:
        return f"POST {summary.path}"
    return f"{summary.operation} {summary.model[:_MAX_CHARS]}".rstrip()


def _attributes(report: RequestReport) -> Attributes:
    """OpenTelemetry's names where there are any; unknown values are left out."""
    summary = report.summary
    num_completions = summary.num_completions
    found: Attributes = {
        "gen_ai.provider.name": "windlass",
        "gen_ai.operation.name": summary.operation,
        "gen_ai.request.model": summary.model[:_MAX_CHARS],
        "gen_ai.request.max_tokens": summary.max_tokens,
        "gen_ai.request.temperature": summary.temperature,
        "gen_ai.request.top_p": summary.top_p,
        "gen_ai.request.choice.count": num_completions if num_completions != 1 else None,
        "gen_ai.request.stream": summary.stream,
        "gen_ai.response.id": summary.response_id,
        "gen_ai.response.finish_reasons": summary.finish_reasons,
        "gen_ai.response.time_to_first_chunk": summary.ttft_s if summary.stream else None,
        "gen_ai.usage.input_tokens": summary.num_prompt,
        "gen_ai.usage.output_tokens": summary.num_output,
        "gen_ai.usage.cache_read.input_tokens": summary.num_cached,
        "http.request.method": "POST",
        "http.response.status_code": summary.status,
        "url.path": summary.path,
        "user_agent.original": summary.user_agent,
        "error.type": summary.reason if summary.outcome != "success" else None,
        "windlass.outcome": summary.outcome,
        "windlass.tenant": summary.tenant,
        "windlass.adapter": summary.adapter,
        "windlass.client_request_id": summary.client_id,
        "windlass.batch": summary.is_batch or None,
        "windlass.draft_tokens": summary.num_drafted,
        "windlass.accepted_draft_tokens": summary.num_accepted,
        "windlass.time_to_first_token": summary.ttft_s,
        "windlass.time_per_output_token": summary.tpot_s,
        "windlass.queue_time": report.queue_s,
        "windlass.cost_usd": report.cost_usd,
        "windlass.replicas": report.replicas,
    }
    return {name: value for name, value in found.items() if value not in (None, "", [], ())}


def _phases(report: RequestReport) -> Iterator[tuple[str, float, float, Attributes]]:
    """The phases of a request: name, start, end, attributes."""
    at = report.summary.began
    for name, end in report.summary.phases:
        yield name, at, end, {}
        at = end
    traces = report.traces
    if not traces:
        return
    yield "submit", at, min(trace.timeline.arrived for trace in traces), {}
    for index, trace in enumerate(traces[:_MAX_TRACED_COMPLETIONS]):
        numbered = {"windlass.completion.index": index} if len(traces) > 1 else {}
        for name, start, end, attributes in _engine_phases(trace):
            yield name, start, end, {**attributes, **numbered}
    last = max(trace.ended for trace in traces)
    yield "send", min(last, report.summary.ended), report.summary.ended, {}


def _engine_phases(trace: RequestTrace) -> Iterator[tuple[str, float, float, Attributes]]:
    times = trace.timeline
    blocked = {
        f"windlass.blocked_by.{name.replace(' ', '_')}": seconds
        for name, seconds in zip(BLOCKERS, trace.blocked_s, strict=True)
        if seconds
    }
    queue = {"windlass.queue.ahead": trace.num_ahead, "windlass.queue.running": trace.num_running}
    admitted = trace.ended if times.admitted is None else times.admitted
    yield "queue", times.arrived, admitted, {**queue, **blocked}
    if times.admitted is None:
        return
    prompt = {
        "windlass.prompt_tokens": times.num_prompt,
        "windlass.cached_tokens": times.num_cached,
        "windlass.chunks": times.num_chunks,
    }
    first = trace.ended if times.first_token is None else times.first_token
    yield "prefill", times.admitted, first, prompt
    if times.first_token is None:
        return
    output: Attributes = {
        "windlass.output_tokens": times.num_output,
        "windlass.draft_tokens": times.num_drafted,
        "windlass.accepted_draft_tokens": times.num_accepted,
        "windlass.preemptions": times.num_preemptions,
    }
    if trace.finish is not None:
        output["windlass.finish"] = trace.finish
    yield "decode", times.first_token, trace.ended, output


def make_spans(flag: str | None) -> RequestSpans | None:
    """The exporter that the flag or the environment asks for; None: traces are not exported."""
    endpoint = endpoint_of(flag, os.environ)
    return None if endpoint is None else RequestSpans(endpoint)
