"""Deadlines of HTTP requests, in every API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.serve.conftest import Server, running, wait_until
from tests.serve.fakes import Options, counting

LONG: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One slot, so that a second request is queued."""
    with running(counting(Options(max_num_seqs=1, step_s=0.005))) as server:
        server.complete(prompt="y" * 1000, max_tokens=1)  # the measured rate is that of many tokens
        yield server


APIS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", **LONG},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], **LONG},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1500},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1500},
    "/api/chat": {"messages": [{"role": "user", "content": "Hi"}], "stream": False},
    "/api/generate": {"prompt": "Hi", "stream": False},
    "/completion": {"prompt": "Hi", "n_predict": 1500},
}


def finish_of(body: dict[str, Any]) -> object:
    """The reason why a response ended, wherever its API puts it."""
    if "choices" in body:
        return body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]
    if "incomplete_details" in body:
        return body["incomplete_details"]["reason"]
    return body.get("stop_reason") or body.get("done_reason") or body["stop_type"]


CUT = {
    "/v1/completions": ("length", "deadline"),
    "/v1/chat/completions": ("length", "deadline"),
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
    "/api/chat": "length",
    "/api/generate": "length",
    "/completion": "limit",
}


# The header is read before the body, so it does not depend on the API.
@pytest.mark.parametrize(
    ("path", "where"),
    [
        *((path, "body") for path in APIS),
        *((path, "header") for path in ("/v1/completions", "/v1/chat/completions")),
    ],
)
def test_an_answer_is_cut_at_its_deadline_in_every_api(
    server: Server, path: str, where: str
) -> None:
    body, headers = dict(APIS[path]), {}
    if where == "body":
        body["deadline_ms"] = 400
    else:
        headers["X-Windlass-Deadline-Ms"] = "400"
    response = server.http.post(path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    assert finish_of(response.json()) == CUT[path]
    assert "X-Windlass-Unknown-Fields" not in response.headers


def test_a_stream_ends_as_at_max_tokens(server: Server) -> None:
    stream = server.openai.completions.create(
        model="counter",
        prompt="Hi",
        max_tokens=1500,
        stream=True,
        extra_body={"deadline_ms": 400, "ignore_eos": True},
    )
    reasons = [chunk.choices[0].finish_reason for chunk in stream]
    assert 2 < len(reasons) < 1500
    assert reasons[-1] == "length"


def test_a_request_in_the_queue_is_dropped_with_the_reason(server: Server) -> None:
    before = server.metric("deadlines_exceeded_total")
    running_one = server.openai.completions.create(
        model="counter", prompt="Hi", stream=True, max_tokens=1500, extra_body={"ignore_eos": True}
    )
    next(iter(running_one))
    with pytest.raises(openai.APIStatusError) as caught:
        # The client would send it again, if the response did not say otherwise.
        server.openai.with_options(max_retries=2).completions.create(
            model="counter", prompt="Hi", extra_body={"deadline_ms": 50, "request_id": "queued"}
        )
    running_one.close()
    assert caught.value.status_code == 504
    assert caught.value.code == "deadline_exceeded"
    assert caught.value.type == "timeout_error"
    assert "the deadline" in caught.value.message
    assert caught.value.response.headers["x-should-retry"] == "false"
    explained = server.http.get("/v1/requests/cmpl-queued/explain").json()
    assert "The request ended because the deadline" in explained["sentence"]
    wait_until(lambda: server.metric("deadlines_exceeded_total") == before + 1)
    received, in_flight = server.metric("requests_received_total"), "requests_in_flight"
    ended = server.metric("request_outcomes_total")
    assert received == ended + server.metric(in_flight)


def test_a_deadline_that_cannot_be_met_is_refused_before_prefill() -> None:
    # The measured rate is a step of 0.5 s for three tokens, so the long prompt takes minutes: the
    # deadline is far off when the request ends, also on a busy machine.
    with running(counting(Options(max_num_seqs=1, step_s=0.5))) as slow:
        slow.complete(max_tokens=1)
        response = slow.complete(prompt="x" * 1900, deadline_ms=20_000, max_tokens=1)
        assert response.status_code == 504
        assert "prompt tokens (0 more are cached) at" in response.json()["error"]["message"]
        wait_until(lambda: slow.metric("deadlines_exceeded_total", phase="predicted") == 1)


def test_the_earlier_of_field_and_header_counts(server: Server) -> None:
    response = server.http.post(
        "/v1/completions",
        json={"prompt": "Hi", **LONG, "deadline_ms": 60_000},
        headers={"X-Windlass-Deadline-Ms": "400"},
    )
    assert response.json()["choices"][0]["stop_reason"] == "deadline"


@pytest.mark.parametrize("value", ["", "soon", "-1", "0", "nan", "inf", "1e12"])
def test_a_bad_header_is_refused(server: Server, value: str) -> None:
    headers = {"X-Windlass-Deadline-Ms": value}
    response = server.http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "deadline_ms"


@pytest.mark.parametrize("value", [0, -5, "100", 1e12, True])
def test_a_bad_field_is_refused(server: Server, value: object) -> None:
    response = server.complete(deadline_ms=value)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "deadline_ms"


def test_beam_search_ends_with_an_error(server: Server) -> None:
    response = server.complete(use_beam_search=True, n=2, max_tokens=1000, deadline_ms=60)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"


def test_deadlines_hold_with_http_workers() -> None:
    with running(counting(Options(max_num_seqs=1, step_s=0.005)), http_workers=2) as server:
        cut = server.complete(**LONG, deadline_ms=100).json()["choices"][0]
        assert (cut["finish_reason"], cut["stop_reason"]) == ("length", "deadline")
        response = server.complete(prompt="x" * 1900, deadline_ms=20, max_tokens=1)
        assert response.status_code == 504
        assert response.headers["x-should-retry"] == "false"
