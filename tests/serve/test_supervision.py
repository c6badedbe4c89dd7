"""Supervision: stopped engines, and requests that kill every engine."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
import zmq.asyncio

from tests.serve.conftest import Server, running, wait_until
from tests.serve.fakes import Options, counting
from windlass.core.sampling import SamplingParams
from windlass.core.types import NewRequest
from windlass.errors import WorkerDied
from windlass.serve import messages
from windlass.serve.client import EngineClient, _Flight
from windlass.serve.health import RestartPolicy
from windlass.serve.inbox import Inbox

NUM_INNOCENTS = 20


@contextmanager
def in_flight(server: Server, **body: object) -> Iterator[Callable[[], httpx.Response]]:
    """Start a request; yields a function that waits for its response."""
    with ThreadPoolExecutor(1) as pool:
        before = server.client.num_in_flight
        response = pool.submit(server.complete, **body)
        wait_until(lambda: server.client.num_in_flight > before)
        yield response.result


def test_an_aborted_request_that_no_engine_has_loses_its_trace() -> None:
    """The quarantine holds it back: no engine will send its trace, and its entry must not stay open."""

    async def body() -> None:
        client = EngineClient(counting(Options()))
        lost: list[str] = []
        client.on_traces_lost = lost.extend
        request = NewRequest("held", [1, 2, 3], SamplingParams())
        add = messages.Add(request, b"content")
        client._flights["held"] = _Flight(add, Inbox(["held"], None))
        client.abort("held")
        assert lost == ["held"]
        assert client.num_in_flight == 0

    asyncio.run(body())


def is_late(server: Server) -> bool:
    return server.http.get("/health/ready").status_code == 503


def test_a_stopped_engine_is_replaced() -> None:
    """After SIGSTOP the engine cannot exit, so the server must kill it."""
    with running(hang_timeout=1.0) as server:
        pid = server.client.replicas[0].pid
        assert pid is not None
        with in_flight(server, prompt="SLOW", max_tokens=1000) as response:
            os.kill(pid, signal.SIGSTOP)
            wait_until(lambda: is_late(server))
            refused = server.complete()
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            failed = response()
        assert failed.status_code == 503
        assert "no heartbeat" in failed.json()["error"]["message"]
        wait_until(lambda: server.client.replicas[0].pid not in (pid, None))
        wait_until(lambda: server.http.get("/health/generate").status_code == 200)
        assert server.complete(max_tokens=2).status_code == 200


def test_an_idle_engine_that_is_stopped_is_replaced() -> None:
    with running(hang_timeout=0.5) as server:
        pid = server.client.replicas[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: server.client.replicas[0].pid not in (pid, None))
        wait_until(lambda: server.complete(max_tokens=2).status_code == 200)


@pytest.mark.parametrize("fault", ["DIE", "HANG", "CRASH"])
def test_a_request_that_kills_the_engine_is_not_run_a_third_time(fault: str) -> None:
    with running(hang_timeout=1.0) as server:
        statuses = []
        for _ in range(2):
            wait_until(lambda: server.http.get("/health/ready").status_code == 200)
            statuses.append(server.complete(prompt=fault).status_code)
        wait_until(lambda: server.http.get("/health/ready").status_code == 200)
        pid = server.client.replicas[0].pid
        refused = server.complete(prompt=fault)
        assert refused.status_code == 422
        error = refused.json()["error"]
        assert error["code"] == "request_blocked"
        assert "again" not in error["message"]
        assert statuses == ([500, 500] if fault == "CRASH" else [503, 422])
        assert server.complete(prompt="other", max_tokens=2).status_code == 200
        assert server.client.replicas[0].pid == pid


def test_a_request_that_hangs_the_engine_is_blocked_after_disconnects_too() -> None:
    with running(hang_timeout=1.0) as server:
        for _ in range(2):
            wait_until(lambda: server.http.get("/health/ready").status_code == 200)
            pid = server.client.replicas[0].pid
            with pytest.raises(httpx.TimeoutException):
                server.http.post("/v1/completions", json={"prompt": "HANG"}, timeout=0.3)
            wait_until(lambda pid=pid: server.client.replicas[0].pid not in (pid, None))
        wait_until(lambda: server.http.get("/health/ready").status_code == 200)
        assert server.complete(prompt="HANG").status_code == 422


def test_only_the_poison_request_is_blocked() -> None:
    """Clients retry until they are served or refused; only the poison request may be refused."""
    policy = RestartPolicy(max_restarts=5, first_pause_s=0.05)
    barrier = threading.Barrier(NUM_INNOCENTS + 1)
    deadline = threading.Event()

    def retry(server: Server, prompt: str) -> list[int]:
        """The statuses of one client's attempts."""
        barrier.wait(20)
        statuses: list[int] = []
        while not deadline.is_set():
            statuses.append(server.complete(prompt=prompt, max_tokens=8).status_code)
            if statuses[-1] != 503:
                break
            deadline.wait(0.3)
        return statuses

    with (
        running(counting(Options(step_s=0.002)), restarts=policy) as server,
        ThreadPoolExecutor(NUM_INNOCENTS + 1) as pool,
    ):
        prompts = [f"SLOW innocent {number}" for number in range(NUM_INNOCENTS)]
        innocents = [pool.submit(retry, server, prompt) for prompt in prompts]
        poison = pool.submit(retry, server, "SLOW DIE")
        try:
            assert poison.result(60)[-1] == 422
            assert [each.result(60)[-1] for each in innocents] == [200] * NUM_INNOCENTS
        finally:
            deadline.set()
        wait_until(lambda: server.http.get("/health/ready").status_code == 200)
        assert server.complete(prompt="SLOW DIE", max_tokens=8).status_code == 422
        assert not server.client.failed.is_set()


def test_queued_requests_are_not_suspects() -> None:
    with running(counting(Options(max_num_seqs=1))) as server, ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            wait_until(lambda: server.http.get("/health/ready").status_code == 200)
            pid = server.client.replicas[0].pid
            with in_flight(server, prompt="SLOW", max_tokens=1000, seed=pid) as running_request:
                wait_until(lambda: server.client.replicas[0].stats.num_running == 1)
                waiting = pool.submit(server.complete, prompt="waits", max_tokens=2)
                wait_until(lambda: server.client.replicas[0].stats.num_waiting == 1)
                os.kill(pid or 0, signal.SIGKILL)
                assert running_request().status_code == 503
                response = waiting.result(20)
                assert response.status_code == 503
                assert "before this request was started" in response.json()["error"]["message"]
            wait_until(lambda pid=pid: server.client.replicas[0].pid not in (pid, None))
        assert server.complete(prompt="waits", max_tokens=2).status_code == 200


def test_the_probe_is_never_blocked() -> None:
    with running(counting(Options(step_s=0.5))) as server, ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            pid = server.client.replicas[0].pid
            probe = pool.submit(server.http.get, "/health/generate")
            wait_until(lambda: server.client.num_in_flight == 1)
            os.kill(pid or 0, signal.SIGKILL)
            assert probe.result(20).status_code == 503
            wait_until(lambda pid=pid: server.client.replicas[0].pid not in (pid, None))
        assert server.http.get("/health/generate").status_code == 200


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_restarts_do_not_leak_descriptors() -> None:
    async def main() -> None:
        client = EngineClient(counting(), restarts=RestartPolicy(first_pause_s=0.01))
        await client.start()
        numbers = []
        for _ in range(3):
            numbers.append(len(os.listdir("/proc/self/fd")))
            pid = client.replicas[0].pid
            os.kill(pid or 0, signal.SIGKILL)
            while client.replicas[0].pid in (pid, None):
                await asyncio.sleep(0.02)
        await client.close()
        assert len(set(numbers)) == 1, numbers

    gc.disable()  # it would close leaked descriptors
    try:
        asyncio.run(asyncio.wait_for(main(), 60))
    finally:
        gc.enable()


def test_a_restart_without_free_descriptors_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lack of descriptors is temporary; the server must not exit."""
    refusals = [zmq.ZMQError(24, "Too many open files"), OSError(24, "Too many open files")]
    make_socket = zmq.asyncio.Context.socket

    async def main() -> None:
        client = EngineClient(counting(), restarts=RestartPolicy(first_pause_s=0.01))
        await client.start()
        pid = client.replicas[0].pid

        def refuse(context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
            if refusals:
                raise refusals.pop()
            return make_socket(context, kind)

        monkeypatch.setattr(zmq.asyncio.Context, "socket", refuse)
        os.kill(pid or 0, signal.SIGKILL)
        request = NewRequest("a", [65], SamplingParams(max_tokens=2))
        try:
            while True:
                try:
                    outputs = [output async for output in client.generate(request)]
                    break
                except WorkerDied:
                    await asyncio.sleep(0.02)
            assert sum(len(output.tokens) for output in outputs) == 2
            assert client.replicas[0].pid not in (pid, None)
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(main(), 30))
    assert not refusals
