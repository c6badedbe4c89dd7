"""Faults: clients that disconnect, engines that fail, hang and die."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest

from tests.serve.conftest import QUICK_RESTARTS, Server, running, wait_until
from tests.serve.fakes import Options, broken_build, build_once, counting, dying_build
from windlass.errors import CheckpointError, WorkerDied
from windlass.serve.client import EngineClient
from windlass.serve.health import RestartPolicy

SLOW = {"prompt": "SLOW", "max_tokens": 1000}


def idle(server: Server) -> bool:
    load = server.http.get("/load").json()
    stats = server.client.replicas[0].stats
    counts = (stats.num_running, stats.num_waiting, stats.num_used_blocks)
    return load["server_load"] == 0 and counts == (0, 0, 0)


def outcomes(server: Server) -> float:
    return server.metric("request_outcomes_total") + server.metric("requests_in_flight")


def test_disconnected_clients_leave_no_state() -> None:
    """200 clients disconnect at random: while queued, before the first token, in mid-stream."""
    dice = random.Random(7)

    def disconnect(number: int) -> None:
        stream = number % 2 == 0
        timeout_s = dice.uniform(0.005, 0.4)
        body = {**SLOW, "prompt": f"SLOW {number}", "stream": stream, "n": 1 + number % 3}
        try:
            with http.stream("POST", "/v1/completions", json=body, timeout=timeout_s) as response:
                for count, _ in enumerate(response.iter_lines()):
                    if count > timeout_s * 100:
                        return
        except httpx.TransportError:
            pass

    with running(counting(Options(max_num_seqs=16, num_blocks=512))) as server:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        with (
            httpx.Client(base_url=server.url, limits=limits) as http,
            ThreadPoolExecutor(24) as pool,
        ):
            list(pool.map(disconnect, range(200)))
        wait_until(lambda: idle(server))
        assert server.client.num_in_flight == 0
        received = server.metric("requests_received_total")
        assert received == outcomes(server)
        assert server.metric("request_outcomes_total", outcome="aborted") > 100
        assert server.http.get("/health/generate").status_code == 200
        assert server.complete(max_tokens=3).json()["choices"][0]["text"] == "def"


def test_received_requests_equal_the_sum_of_outcomes() -> None:
    dice = random.Random(3)
    bodies = [
        {"prompt": "ok", "max_tokens": 4},
        {"prompt": "ok", "max_tokens": 4, "stream": True, "n": 2},
        {"prompt": "bad", "temperature": -1},
        {"prompt": ""},
        {"prompt": "CRASH"},
        {"prompt": "x" * 9999},
    ]
    with running() as server:
        with ThreadPoolExecutor(4) as pool:
            chosen = [dice.choice(bodies) for _ in range(80)]
            replies = list(pool.map(lambda body: server.complete(**body), chosen))
        wait_until(lambda: server.metric("requests_in_flight") == 0)
        assert server.metric("requests_received_total") == len(replies) == outcomes(server)
        for outcome, statuses in {"rejected": {400, 422, 429}, "error": {500, 503}}.items():
            expected = sum(reply.status_code in statuses for reply in replies)
            errors_in_streams = sum('"error"' in r.text and r.status_code == 200 for r in replies)
            counted = server.metric("request_outcomes_total", outcome=outcome)
            assert expected <= counted <= expected + errors_in_streams


def test_a_failed_step_fails_only_its_own_requests() -> None:
    with running() as server:
        failed = server.complete(prompt="CRASH")
        assert failed.status_code == 500
        assert "the counter is broken" in failed.json()["error"]["message"]
        pid = server.client.replicas[0].pid
        assert server.complete(max_tokens=2).json()["choices"][0]["text"] == "de"
        assert server.client.replicas[0].pid == pid


def test_three_failed_steps_in_a_row_restart_the_engine() -> None:
    with running() as server:
        pid = server.client.replicas[0].pid
        for number in range(3):
            assert server.complete(prompt=f"CRASH {number}").status_code == 500
        wait_until(lambda: server.client.replicas[0].pid not in (pid, None))
        assert server.complete(max_tokens=2).status_code == 200


def test_killed_engine_in_mid_stream() -> None:
    """The stream ends with an error, health fails, then a new engine serves."""
    slow_start = RestartPolicy(first_pause_s=1.0)
    with running(restarts=slow_start) as server:
        stream = server.openai.completions.create(
            model="counter", prompt="SLOW", max_tokens=1000, stream=True
        )
        assert next(stream).choices[0].text
        os.kill(server.client.replicas[0].pid or 0, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="signal 9"):
            list(stream)
        assert server.http.get("/health/ready").status_code == 503
        assert server.http.get("/health/live").status_code == 200
        refused = server.complete()
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "engine_unavailable"
        wait_until(lambda: server.http.get("/health/ready").status_code == 200)
        assert server.complete(max_tokens=2).json()["choices"][0]["text"] == "de"
        assert server.metric("generation_tokens_total") >= 2
        assert server.metric("request_outcomes_total", outcome="error") == 2


def test_a_stream_without_tokens_gets_a_status_when_the_engine_dies() -> None:
    with running(restarts=QUICK_RESTARTS) as server:
        assert server.complete(prompt="DIE", stream=True).status_code == 503


def test_a_hung_engine_fails_health_and_is_replaced() -> None:
    with running(hang_timeout=1.0) as server:
        pid = server.client.replicas[0].pid
        thread = threading.Thread(target=lambda: server.complete(prompt="HANG"))
        thread.start()
        wait_until(lambda: server.http.get("/health/ready").status_code == 503)
        unhealthy = server.http.get("/health/generate")
        assert unhealthy.status_code == 503
        assert "no heartbeat" in unhealthy.json()["reason"]
        thread.join(10)
        wait_until(lambda: server.client.replicas[0].pid not in (pid, None))
        wait_until(lambda: server.http.get("/health/generate").status_code == 200)


def test_an_engine_that_keeps_dying_ends_the_server(tmp_path: Path) -> None:
    policy = RestartPolicy(max_restarts=2, first_pause_s=0.02)
    with running(partial(build_once, str(tmp_path / "flag")), restarts=policy) as server:
        os.kill(server.client.replicas[0].pid or 0, signal.SIGKILL)
        wait_until(server.client.failed.is_set)
        wait_until(lambda: "not restarted again" in server.client.health().reason)
        assert server.stop() == 1


def test_the_error_of_a_build_is_raised() -> None:
    async def start(build: object) -> None:
        client = EngineClient(build)  # type: ignore[arg-type]
        try:
            await client.start()
        finally:
            await client.close()

    with pytest.raises(CheckpointError, match="5 bytes of 80"):
        asyncio.run(start(broken_build))
    with pytest.raises(WorkerDied, match="exit code 7"):
        asyncio.run(start(dying_build))


def test_too_many_requests() -> None:
    two_slots = counting(Options(max_num_seqs=2))
    with (
        running(two_slots, max_num_queued_reqs=2, shutdown_timeout=0.1) as server,
        ThreadPoolExecutor(4) as pool,
    ):
        for _ in range(4):
            pool.submit(server.complete, **SLOW)
        wait_until(lambda: server.client.replicas[0].stats.num_waiting == 2)
        refused = server.complete()
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "overloaded"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert server.metric("admission_rejections_total", reason="max_num_queued_reqs") == 1
        assert server.stop() == 0


def test_too_many_waiting_tokens() -> None:
    one_slot = counting(Options(max_num_seqs=1))
    with running(one_slot, max_num_queued_tokens=100, shutdown_timeout=0.1) as server:
        assert server.complete(prompt="x" * 500, max_tokens=1).status_code == 200
        with ThreadPoolExecutor(2) as pool:
            pool.submit(server.complete, **SLOW)
            wait_until(lambda: server.client.replicas[0].stats.num_running == 1)
            pool.submit(server.complete, **SLOW)
            wait_until(lambda: server.client.replicas[0].stats.num_waiting == 1)
            refused = server.complete(prompt="x" * 200)
            assert refused.status_code == 429
            assert "100 prompt tokens" in refused.json()["error"]["message"]
            assert server.stop() == 0
