"""Requests that two HTTP parsers could read differently, and headers made of a client's text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.conftest import Server, running
from tests.serve.raw import RawClient, get, status_of

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\n"
)
BODY = b'{"prompt":"Hi","max_tokens":1}'
CHUNKS = b"1e\r\n" + BODY + b"\r\n0\r\n\r\n"
# A request that a proxy may have taken for a part of the one before.
HIDDEN = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
LENGTH, CHUNKED = b"Content-Length: 30\r\n", b"Transfer-Encoding: chunked\r\n"

AMBIGUOUS = {
    "length and chunks": HEAD + b"Content-Length: 4\r\n" + CHUNKED + b"\r\n" + CHUNKS,
    "chunks and length": HEAD + CHUNKED + b"Content-Length: 4\r\n\r\n" + CHUNKS,
    "two lengths": HEAD + LENGTH + b"Content-Length: 3\r\n\r\n" + BODY,
    "a list of lengths": HEAD + b"Content-Length: 30, 30\r\n\r\n" + BODY,
    "a signed length": HEAD + b"Content-Length: +30\r\n\r\n" + BODY,
    "a negative length": HEAD + b"Content-Length: -1\r\n\r\n" + BODY,
    "a hexadecimal length": HEAD + b"Content-Length: 0x1e\r\n\r\n" + BODY,
    "a space before the colon": HEAD + b"Content-Length : 30\r\n\r\n" + BODY,
    "a folded header": HEAD + b"X-A: b\r\n c: d\r\n" + LENGTH + b"\r\n" + BODY,
    "a NUL": HEAD + b"X-A: a\0b\r\n" + LENGTH + b"\r\n" + BODY,
    "a lone CR": HEAD + b"X-A: a\rX-B: b\r\n" + LENGTH + b"\r\n" + BODY,
    "a negative chunk": HEAD + CHUNKED + b"\r\n-1\r\n" + BODY,
    "a huge chunk": HEAD + CHUNKED + b"\r\nfffffffffffffffff\r\n" + BODY,
    "a chunk that is too long": HEAD + CHUNKED + b"\r\n1d\r\n" + BODY + b"\r\n0\r\n\r\n",
}


@pytest.fixture(scope="module", params=[1, 2], ids=["one-process", "two-workers"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with running(enable_request_id_headers=True, http_workers=request.param) as server:
        yield server


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_an_ambiguous_request_is_refused_with_all_that_follows(server: Server, name: str) -> None:
    with RawClient(server.url) as client:
        client.send(AMBIGUOUS[name] + HIDDEN)
        answer = client.read_all()
    assert status_of(answer) == 400
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("value", ["a\x01b", "a\x7fb", "\xe9"])
def test_an_id_in_a_header_splits_no_answer(server: Server, value: str) -> None:
    with RawClient(server.url) as client:
        client.send(get("/version", f"X-Request-Id: {value}", "Connection: close"))
        answer = client.read_all()
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("field", ["request_id", "model", "X\r\nSet-Cookie: a=b", "user"])
def test_text_of_a_body_adds_no_header(server: Server, field: str) -> None:
    answer = server.complete(**{field: "a\r\nSet-Cookie: a=b\r\n\r\n<script>", "max_tokens": 1})
    assert answer.status_code in (200, 400, 404)
    assert "set-cookie" not in answer.headers
    assert answer.headers["content-type"].startswith("application/json")
