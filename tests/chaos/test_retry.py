"""--retry-on-restart: requests of which the client has seen nothing survive the death of an engine."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.serve.conftest import Server, running, wait_until
from tests.serve.fakes import Options, build_once, counting
from windlass.serve.health import RestartPolicy

NUM_TOKENS = 60
ONE_SLOT = counting(Options(max_num_seqs=1))


def kill_engine(server: Server) -> None:
    os.kill(server.client.replicas[0].pid or 0, signal.SIGKILL)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def streamed_text(server: Server, **body: object) -> str:
    chunks = server.openai.completions.create(model="counter", stream=True, **body)  # type: ignore[call-overload]
    return "".join(chunk.choices[0].text for chunk in chunks)


def has_tokens(server: Server, num_tokens: int) -> bool:
    return server.client.replicas[0].stats.num_generated_tokens >= num_tokens


@pytest.mark.parametrize("http_workers", [1, 2])
def test_a_whole_response_starts_again(http_workers: int) -> None:
    """It had tokens, of which its client has seen nothing."""
    body = {"prompt": "SLOW", "max_tokens": NUM_TOKENS, "n": 2, "logprobs": 1}
    with running(retry_on_restart=True, http_workers=http_workers) as server:
        expected = server.complete(**body).json()["choices"]
        with ThreadPoolExecutor(1) as pool:
            response = pool.submit(server.complete, **body)
            wait_until(lambda: has_tokens(server, 2 * NUM_TOKENS + 10))
            kill_engine(server)
            again = response.result(60)
        assert again.status_code == 200, again.text
        assert again.json()["choices"] == expected
        assert len(expected[0]["logprobs"]["tokens"]) == NUM_TOKENS
        assert again.json()["usage"]["completion_tokens"] == 2 * NUM_TOKENS
        wait_until(lambda: server.client.num_in_flight == 0)
        assert server.metric("request_outcomes_total", outcome="success") == 2
        assert server.metric("request_outcomes_total", outcome="error") == 0


def test_queued_requests_wait_for_the_restart_and_a_started_stream_fails() -> None:
    with running(ONE_SLOT, retry_on_restart=True) as server, ThreadPoolExecutor(3) as pool:
        started = server.openai.completions.create(
            model="counter", prompt="SLOW", max_tokens=1000, stream=True
        )
        first = next(iter(started)).choices[0].text
        body = {"prompt": "waits", "max_tokens": NUM_TOKENS}
        stream = pool.submit(streamed_text, server, **body)
        whole = pool.submit(server.complete, **body)
        gone = pool.submit(disconnect_after, server, 0.2)
        wait_until(lambda: server.client.num_in_flight == 4)
        assert gone.result(20) is None
        kill_engine(server)
        with pytest.raises(Exception, match="signal 9"):
            first += "".join(chunk.choices[0].text for chunk in started)
        text = text_of(whole.result(60))
        assert len(text) == NUM_TOKENS
        assert stream.result(60) == text
        wait_until(lambda: server.client.num_in_flight == 0)
        assert server.client.backlog.num_unseen == 0
        assert len(first) < 1000


def disconnect_after(server: Server, timeout_s: float) -> None:
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "waits, too"}, timeout=timeout_s)


def test_a_request_that_kills_two_engines_is_not_run_a_third_time() -> None:
    with running(retry_on_restart=True) as server:
        refused = server.complete(prompt="DIE")
        assert refused.status_code == 422, refused.text
        assert refused.json()["error"]["code"] == "request_blocked"
        wait_until(lambda: server.http.get("/health/ready").status_code == 200)
        assert server.complete(max_tokens=2).status_code == 200


def test_an_innocent_request_in_flight_at_two_deaths_is_not_retried_again() -> None:
    with running(retry_on_restart=True) as server, ThreadPoolExecutor(1) as pool:
        response = pool.submit(server.complete, prompt="SLOW", max_tokens=1000)
        for _ in range(2):
            wait_until(lambda: server.client.replicas[0].stats.num_running == 1)
            kill_engine(server)
            wait_until(lambda: server.client.replicas[0].stats.num_running == 0)
        failed = response.result(60)
        assert failed.status_code == 422, failed.text  # it was running at both


def test_waiting_requests_fail_when_the_engine_does_not_come_back(tmp_path: Path) -> None:
    build = partial(build_once, str(tmp_path / "flag"))
    policy = RestartPolicy(max_restarts=2, first_pause_s=0.05)
    with running(build, restarts=policy, retry_on_restart=True) as server:
        with ThreadPoolExecutor(1) as pool:
            response = pool.submit(server.complete, prompt="SLOW", max_tokens=1000)
            wait_until(lambda: server.client.replicas[0].stats.num_running == 1)
            kill_engine(server)
            failed = response.result(60)
        assert failed.status_code == 503
        assert "not restarted again" in failed.json()["error"]["message"]
        assert server.stop() == 1
