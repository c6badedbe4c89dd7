"""One line per request: how it ended, tokens, times, cost; nothing of its text and no key."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve.conftest import Server, running, wait_until
from tests.serve.fakes import Options, counting
from tests.serve.test_http_workers import workers
from windlass.config import ServeConfig
from windlass.errors import ConfigError
from windlass.serve.logs import _JsonFormatter, _TextFormatter, escaped

KEY, ADMIN = "client-secret", "admin-secret"
HEADERS = {"Authorization": f"Bearer {KEY}"}
TRACE = "0af7651916cd43dd8448eb211c80319c"


class Lines(logging.Handler):
    """The records of the request log, and all records as text and as JSON."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: list[dict[str, Any]] = []
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts += [_TextFormatter().format(record), _JsonFormatter().format(record)]
        if record.name == "windlass.request":
            self.fields.append(record.fields)  # type: ignore[attr-defined]

    def next(self) -> dict[str, Any]:
        wait_until(lambda: bool(self.fields), timeout_s=10)
        return self.fields.pop(0)


@pytest.fixture(scope="module")
def lines() -> Iterator[Lines]:
    handler, log = Lines(), logging.getLogger("windlass")
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)
    log.setLevel(level)


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "HTTP workers"])
def server(request: pytest.FixtureRequest, lines: Lines) -> Iterator[Server]:
    with running(
        counting(Options(step_s=0.001)),
        http_workers=request.param,
        enable_log_requests=True,
        price_per_hour=1.0,
        api_key=(KEY,),
        admin_key=(ADMIN,),
        num_replicas=request.param,
    ) as server:
        server.http.headers.update(HEADERS)
        lines.fields.clear()
        yield server


def test_a_line_has_tokens_times_and_cost(server: Server, lines: Lines) -> None:
    headers = {
        "X-Request-Id": "mine",
        "User-Agent": "curl/8",
        "traceparent": f"00-{TRACE}-{1:016x}-01",
    }
    body = {"prompt": "A secret prompt of forty-one characters..", "max_tokens": 6}
    server.http.post("/v1/completions", json=body)
    lines.next()
    response = server.http.post("/v1/completions", json=body, headers=headers).json()
    line = lines.next()
    assert line["id"] == response["id"]
    expected = {
        "client_request_id": "mine",
        "user_agent": "curl/8",
        "trace_id": TRACE,
        "path": "/v1/completions",
        "model": "counter",
        "stream": False,
        "status": 200,
        "outcome": "success",
        "reason": "length",
        "prompt_tokens": response["usage"]["prompt_tokens"],
        "cached_tokens": 32,
        "output_tokens": 6,
        "accepted_draft_tokens": 0,
    }
    assert {name: line[name] for name in expected} == expected
    assert line["replica"] in (0, 1)
    assert line["cost_usd"] > 0
    assert 0 < line["queue_s"] < line["ttft_s"] < line["total_s"]
    assert line["tpot_s"] > 0
    assert len(line["tenant"]) == 12


def test_how_a_request_ended(server: Server, lines: Lines) -> None:
    server.complete(prompt="Hi", max_tokens=50, stop=["h"])
    assert lines.next()["reason"] == "stop"
    server.complete(max_tokens=4, stream=True)
    line = lines.next()
    assert (line["stream"], line["reason"], line["output_tokens"]) == (True, "length", 4)
    server.complete(max_tokens=4, temperature=-1)
    line = lines.next()
    assert (line["status"], line["outcome"]) == (400, "rejected")
    assert line["reason"] == "invalid_request_error"
    server.complete(prompt=[1] * 100_000)
    assert lines.next()["reason"] == "context_length_exceeded"
    server.complete(prompt="CRASH", max_tokens=4)
    line = lines.next()
    assert (line["status"], line["outcome"]) == (500, "error")
    server.complete(max_tokens=4, n=2, use_beam_search=True, temperature=0)
    line = lines.next()
    assert (line["status"], line["output_tokens"]) == (200, 8)
    assert line["cost_usd"] > 0


def test_a_client_that_disconnects(server: Server, lines: Lines) -> None:
    body = {"prompt": "SLOW", "max_tokens": 1000, "stream": True, "ignore_eos": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    line = lines.next()
    assert (line["status"], line["outcome"]) == (200, "aborted")
    assert line["reason"] == "client_disconnected"
    assert line["output_tokens"] >= 1
    assert line["cost_usd"] > 0  # its trace came after the end


def test_texts_of_clients_cannot_write_lines(server: Server, lines: Lines) -> None:
    model = 'x\n2026-01-01 INFO windlass.request: all is well\x1b[2J\u2028\u202e", "status": 200'
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "Hi", "model": model}).encode()
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            + f"Authorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n".encode()
            + b"X-Request-Id: a\x85\xa0b\tc\r\nUser-Agent: \xe2\x80\xa8\r\n\r\n"
            + body
        )
        while raw.recv(4096):
            pass
    line = lines.next()
    assert (line["status"], line["reason"]) == (404, "model_not_found")
    assert line["model"] == model
    assert line["client_request_id"] == "a\x85\xa0b\tc"  # other control characters are a 400
    assert all(text.isprintable() and len(text.splitlines()) == 1 for text in lines.texts)
    objects = [json.loads(text) for text in lines.texts[1::2]]
    assert objects[-1]["status"] == 404 or objects[-2]["status"] == 404


def test_neither_keys_nor_texts_are_logged(server: Server, lines: Lines) -> None:
    server.chat(messages=[{"role": "user", "content": "A secret prompt"}], max_tokens=2)
    lines.next()
    for headers in (
        {"x-api-key": KEY},
        {"api-key": ADMIN},
        {"Authorization": "Bearer wrong-secret"},
    ):
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "secret"}, headers=headers)
    lines.fields.clear()
    assert len(lines.texts) > 10
    assert not [text for text in lines.texts if "secret" in text]


@pytest.mark.parametrize("server", [2], indirect=True, ids=["HTTP workers"])
def test_requests_of_a_worker_that_dies(server: Server, lines: Lines) -> None:
    assert workers()
    body = {"prompt": "SLOW", "max_tokens": 400, "stream": True, "ignore_eos": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        rows = response.iter_lines()
        next(rows)
        for worker in workers():
            worker.kill()
        with pytest.raises(httpx.HTTPError):
            list(rows)
    line = lines.next()
    assert (line["outcome"], line["reason"]) == ("error", "http_worker_died")


def test_other_apis(lines: Lines) -> None:
    """Paths with other formats have the same line."""
    with running(enable_log_requests=True) as server:
        lines.fields.clear()
        server.http.post(
            "/v1/messages",
            json={
                "messages": [{"role": "user", "content": "Hi"}],
                "max_tokens": 3,
                "model": "counter",
            },
        )
        server.http.post(
            "/api/generate",
            json={"prompt": "Hi", "model": "counter", "options": {"num_predict": 3}},
        )
        server.http.post("/completion", json={"prompt": "Hi", "n_predict": 3})
        paths = [lines.next()["path"] for _ in range(3)]
    assert paths == ["/v1/messages", "/api/generate", "/completion"]


def test_bodies_are_logged_only_if_asked(lines: Lines) -> None:
    with running(log_bodies=True) as server:
        assert any("--log-bodies" in text for text in lines.texts)
        lines.fields.clear()
        answer = server.complete(prompt="x" * 20_000, max_tokens=3).text
        line = lines.next()
        assert line["request_body"].startswith('{"prompt"')
        assert len(line["request_body"]) == 16 * 2**10
        assert "response_body" not in line or line["response_body"] == answer
        answer = server.complete(max_tokens=3).text
        assert lines.next()["response_body"] == answer
        events = server.complete(max_tokens=3, stream=True).text
        assert lines.next()["response_body"] == events


def test_the_default_follows_the_format() -> None:
    assert not ServeConfig().logs_requests
    assert ServeConfig(log_format="json").logs_requests
    assert not ServeConfig(log_format="json", enable_log_requests=False).logs_requests
    assert ServeConfig(log_bodies=True).logs_requests
    with pytest.raises(ConfigError, match="--log-bodies does nothing"):
        ServeConfig(log_bodies=True, enable_log_requests=False)


def test_escapes_are_json() -> None:
    text = 'a\n\t\x00\x7f\u2028\U000e0001ü"\\'
    assert escaped(text) == 'a\\n\\t\\u0000\\u007f\\u2028\\udb40\\udc01ü"\\'
    assert json.loads(escaped(json.dumps(text, ensure_ascii=False))) == text
