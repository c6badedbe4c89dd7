"""Requests as OpenTelemetry traces, at a collector that decodes what the server sends."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import pytest

from tests.serve.conftest import Server, running, wait_until
from tests.serve.fakes import Options, counting
from windlass.config import ServeConfig
from windlass.errors import ConfigError
from windlass.serve.services import _make_spans

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from windlass.serve.otel import endpoint_of, without_password

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "00f067aa0ba902b7"
ENGINE = ["queue", "prefill", "decode"]


@dataclass(frozen=True)
class Received:
    name: str
    trace: str
    span: str
    parent: str
    start: int
    end: int
    kind: int
    status: int
    attributes: dict[str, Any]
    resource: dict[str, Any]


def _values(attributes: Any) -> dict[str, Any]:
    def value(any_value: Any) -> Any:
        kind = any_value.WhichOneof("value")
        found = getattr(any_value, kind)
        return [value(each) for each in found.values] if kind == "array_value" else found

    return {each.key: value(each.value) for each in attributes}


class Collector:
    """An OTLP receiver. `status` is what it answers."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.paths: set[str] = set()
        self.status = 200
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.paths.add(self.path)
                if collector.status == 200:
                    collector.add(ExportTraceServiceRequest.FromString(body))
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def add(self, request: ExportTraceServiceRequest) -> None:
        for part in request.resource_spans:
            resource = _values(part.resource.attributes)
            for scope in part.scope_spans:
                self.spans += [
                    Received(
                        name=each.name,
                        trace=each.trace_id.hex(),
                        span=each.span_id.hex(),
                        parent=each.parent_span_id.hex(),
                        start=each.start_time_unix_nano,
                        end=each.end_time_unix_nano,
                        kind=each.kind,
                        status=each.status.code,
                        attributes=_values(each.attributes),
                        resource=resource,
                    )
                    for each in scope.spans
                ]

    def take(self) -> tuple[Received, list[Received]]:
        """Wait for a whole trace; returns its span of the request, and the others by their start."""

        def roots() -> list[Received]:
            return [each for each in self.spans if each.kind == 2]

        wait_until(lambda: bool(roots()), timeout_s=10)  # the root is exported last
        (root,) = roots()
        children = [each for each in self.spans if each is not root]
        self.spans.clear()
        assert all((each.trace, each.parent) == (root.trace, root.span) for each in children)
        assert all(each.start <= each.end for each in [root, *children])
        return root, sorted(children, key=lambda each: each.start)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
        collector = Collector()
        yield collector
        collector.close()


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "HTTP workers"])
def server(request: pytest.FixtureRequest, collector: Collector) -> Iterator[Server]:
    with running(
        counting(Options(step_s=0.001)),
        http_workers=request.param,
        otlp_traces_endpoint=collector.url,
        price_per_hour=1.0,
        api_key=("client-secret",),
    ) as server:
        server.http.headers["Authorization"] = "Bearer client-secret"
        yield server


def test_a_request_is_a_span_with_a_child_per_phase(server: Server, collector: Collector) -> None:
    response = server.chat(max_tokens=5, temperature=0.5).json()
    root, phases = collector.take()
    assert collector.paths == {"/v1/traces"}
    assert root.name == "chat counter"
    assert root.parent == ""
    assert root.resource["service.name"] == "windlass"
    assert root.resource["deployment.environment"] == "test"
    expected = {
        "gen_ai.provider.name": "windlass",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "counter",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.id": response["id"],
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": response["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
        "windlass.outcome": "success",
        "windlass.accepted_draft_tokens": 0,
        "windlass.replicas": [0],
    }
    assert {name: root.attributes[name] for name in expected} == expected
    assert root.attributes["windlass.cost_usd"] > 0
    assert "error.type" not in root.attributes
    names = [each.name for each in phases]
    assert names == ["receive", "template", "tokenize", "submit", *ENGINE, "send"]
    assert phases[0].start == pytest.approx(root.start, abs=1000)
    assert phases[-1].end == pytest.approx(root.end, abs=1000)
    for before, after in pairwise(phases):
        assert before.end == pytest.approx(after.start, abs=1000)  # no gaps
    decode = phases[names.index("decode")]
    assert decode.attributes["windlass.output_tokens"] == 5
    assert "Hi" not in str([root, *phases]).split()


def test_the_context_of_the_client_is_taken_over(server: Server, collector: Collector) -> None:
    def send(flags: str, traceparent: str | None = None) -> None:
        sent = traceparent or f"00-{TRACE}-{PARENT}-{flags}"
        headers = {"traceparent": sent, "tracestate": "vendor=1", "baggage": "secret=1"}
        body = {"prompt": "Hi", "max_tokens": 2}
        server.http.post("/v1/completions", json=body, headers=headers)

    send("01")
    root, _ = collector.take()
    assert (root.trace, root.parent) == (TRACE, PARENT)
    assert "secret" not in str(root)
    send("00")  # not sampled
    send("", "00-not-a-context-01")  # a new trace
    root, _ = collector.take()
    assert root.parent == ""
    assert root.trace != TRACE


def test_streams_several_completions_and_stop_strings(server: Server, collector: Collector) -> None:
    server.complete(prompt=["Hi", "Ho"], max_tokens=20, n=2, stream=True, stop=["h"])
    root, phases = collector.take()
    assert root.attributes["gen_ai.request.choice.count"] == 2
    assert root.attributes["gen_ai.request.stream"] is True
    assert root.attributes["gen_ai.response.time_to_first_chunk"] > 0
    names = [each.name for each in phases]
    assert [names.count(name) for name in ENGINE] == [4, 4, 4]
    assert {each.attributes.get("windlass.completion.index") for each in phases} == {
        0,
        1,
        2,
        3,
        None,
    }


def test_errors_refusals_and_disconnects(server: Server, collector: Collector) -> None:
    server.complete(max_tokens=2, temperature=-1)
    root, _ = collector.take()
    assert (root.attributes["http.response.status_code"], root.status) == (400, 0)
    assert root.attributes["error.type"] == "invalid_request_error"
    server.http.post("/v1/completions", content=b"{")
    root, phases = collector.take()
    assert (root.name, phases) == ("POST /v1/completions", [])
    server.complete(prompt="CRASH", max_tokens=4)
    root, _ = collector.take()
    assert (root.attributes["http.response.status_code"], root.status) == (500, 2)
    body = {"prompt": "SLOW", "max_tokens": 1000, "stream": True, "ignore_eos": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    root, phases = collector.take()
    assert root.attributes["error.type"] == "client_disconnected"
    decode = next(each for each in phases if each.name == "decode")
    assert decode.attributes["windlass.finish"] == "abort"


def test_beam_search(server: Server, collector: Collector) -> None:
    server.complete(max_tokens=4, n=2, use_beam_search=True, temperature=0)
    root, phases = collector.take()
    assert root.attributes["gen_ai.usage.output_tokens"] == 8
    assert root.attributes["windlass.cost_usd"] > 0
    assert [each.name for each in phases] == ["receive", "tokenize", "submit", *ENGINE, "send"]


def test_a_collector_that_fails_costs_nothing_and_is_logged_once(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    def lines(text: str) -> list[str]:
        return [each.getMessage() for each in caplog.records if text in each.getMessage()]

    caplog.set_level(logging.INFO)
    collector.status = 400
    with running(
        otlp_traces_endpoint=f"{collector.url}/v1/traces", enable_log_requests=True
    ) as server:
        for _ in range(3):
            assert server.complete(max_tokens=2).status_code == 200

        wait_until(lambda: bool(lines("traces are lost")), timeout_s=10)
        server.complete(max_tokens=2)
        collector.status = 200
        wait_until(lambda: bool(server.complete(max_tokens=2) and collector.spans), timeout_s=10)
        wait_until(lambda: bool(lines("exported to") and lines("again")), timeout_s=10)
        (lost,) = lines("traces are lost")
        assert "code: 400" in lost
        assert not [each for each in caplog.records if each.name.startswith("opentelemetry")]
    logged = " ".join(lines("/v1/completions: 200"))
    assert all(f"trace '{each.trace}'" in logged for each in collector.spans)


def test_a_collector_that_is_not_there_does_not_delay_the_end() -> None:
    with running(otlp_traces_endpoint="http://127.0.0.1:9") as server:
        assert server.complete(max_tokens=2).status_code == 200
        assert server.stop() == 0


def test_which_endpoint() -> None:
    flag, common, traces = None, "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
    assert endpoint_of(flag, {}) is None
    assert endpoint_of("http://a:4318", {}) == "http://a:4318/v1/traces"
    assert endpoint_of("https://a/x", {common: "http://b"}) == "https://a/x"
    assert endpoint_of(flag, {common: "http://b:1/"}) == "http://b:1/v1/traces"
    assert endpoint_of(flag, {common: "http://b", traces: "http://c/t"}) == "http://c/t"
    assert endpoint_of(flag, {common: "http://b", "OTEL_TRACES_EXPORTER": "none"}) is None
    assert endpoint_of("http://a", {"OTEL_SDK_DISABLED": "true"}) is None
    assert without_password("https://me:secret@a:1/x?y") == "https://a:1/x?y"
    with pytest.raises(ConfigError, match="must be the http or https URL"):
        endpoint_of("grpc://a:4317", {})
    with pytest.raises(ConfigError, match="exports http/protobuf"):
        endpoint_of("http://a:4317", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})


def test_without_the_extra_the_flag_is_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "windlass.serve.otel")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'windlass-llm\[otel\]'"):
        _make_spans(ServeConfig(otlp_traces_endpoint="http://a"))
    assert _make_spans(ServeConfig()) is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a")
    assert _make_spans(ServeConfig()) is None
    assert "no traces are exported: OTEL_EXPORTER_OTLP_ENDPOINT needs" in caplog.text
