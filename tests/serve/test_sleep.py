"""A server that sleeps: what it refuses, what it tells, and that it answers again afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.conftest import Server, running, wait_until
from tests.serve.fakes import Options, counting

ADMIN = {"Authorization": "Bearer boss"}


def order(server: Server, path: str, **body: object) -> httpx.Response:
    return server.http.post(path, headers=ADMIN, json=body or None)


@pytest.fixture(scope="module")
def napping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("nap") / "asleep"
    with running(counting(Options(nap_file=str(file))), admin_key=("boss",)) as made:
        yield made


@pytest.fixture(scope="module")
def ending() -> Iterator[Server]:
    """One whose memory comes back only when its process ends."""
    with running(counting(Options(step_s=0.002)), admin_key=("boss",)) as made:
        yield made


def check_asleep(server: Server) -> None:
    refused = server.complete(max_tokens=2)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "sleeping"
    assert int(refused.headers["Retry-After"]) >= 1
    health = server.http.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "sleeping")
    assert server.http.get("/health/live").status_code == 200
    assert server.http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert server.http.get("/memory").json()["state"] == "sleeping"
    assert server.metric("engine_sleep_state", sleep_state="awake") == 0


def test_level_one_keeps_the_process(napping: Server) -> None:
    before, pid = napping.complete(max_tokens=5).json()["choices"], napping.client.pid
    done = order(napping, "/admin/sleep", level=1).json()
    assert (done["status"], done["level"], done["reason"]) == ("sleeping", 1, "")
    check_asleep(napping)
    assert napping.metric("engine_sleep_state", sleep_state="weights_offloaded") == 1
    told = napping.http.get("/memory").json()
    assert told["parts"]["weights"] == {"num_bytes": 1000, "resident": 0}
    assert order(napping, "/admin/wake").json()["level"] == 0
    assert napping.complete(max_tokens=5).json()["choices"] == before
    assert napping.client.pid == pid
    assert napping.metric("engine_sleep_state", sleep_state="awake") == 1


def test_other_servers_names_do_the_same(napping: Server) -> None:
    assert napping.http.post("/sleep?level=1", headers=ADMIN).json()["status"] == "sleeping"
    assert napping.http.post("/sleep?level=1", headers=ADMIN).json()["seconds"] == 0
    check_asleep(napping)
    assert napping.http.post("/wake_up", headers=ADMIN).json()["status"] == "awake"
    assert napping.http.post("/wake_up", headers=ADMIN).json()["reason"] == "the server is awake"
    assert napping.complete(max_tokens=2).status_code == 200


def test_what_is_wrong_with_an_order_is_told(napping: Server) -> None:
    for query in ("level=3", "level=x", "mode=gently", "levle=1"):
        answer = napping.http.post(f"/sleep?{query}", headers=ADMIN)
        assert answer.status_code == 400, query
        assert answer.json()["error"]["param"] in ("level", "mode", "levle")
    for path in ("/admin/sleep", "/admin/wake", "/admin/reset_prefix_cache", "/sleep", "/wake_up"):
        refused = napping.http.post(path)
        assert refused.status_code == 403, path
    assert napping.http.get("/is_sleeping").json() == {"is_sleeping": False}


def test_the_process_ends_where_memory_does_not_come_back_otherwise(ending: Server) -> None:
    before, pid = ending.complete(max_tokens=5).json()["choices"], ending.client.pid
    done = order(ending, "/admin/sleep", level=1).json()
    assert done["level"] == 2
    assert "process was stopped" in done["reason"]
    assert ending.client.pid is None
    assert not Path(f"/proc/{pid}").exists()
    check_asleep(ending)
    assert ending.http.get("/metrics").status_code == 200
    assert order(ending, "/admin/reset_prefix_cache").status_code == 503
    assert order(ending, "/admin/wake").json()["seconds"] > 0
    assert ending.complete(max_tokens=5).json()["choices"] == before
    assert ending.client.pid != pid
    assert ending.http.get("/health").json() == {"status": "ok"}


_SLOW_TOKENS = 150  # of 10 ms each: longer than all orders take on a busy machine


def start_slow(server: Server, answers: list[Any]) -> threading.Thread:
    def ask() -> None:
        answers.append(server.complete(prompt="SLOW", max_tokens=_SLOW_TOKENS))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: server.http.get("/load").json()["num_requests_running"] == 1)
    return thread


def test_running_requests_end_first(napping: Server) -> None:
    answers: list[Any] = []
    thread = start_slow(napping, answers)
    refused = order(napping, "/admin/sleep", mode="refuse")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "busy")
    late = order(napping, "/admin/sleep", mode="wait", timeout_s=0.05)
    assert late.status_code == 409
    assert "stays awake" in late.json()["error"]["message"]
    assert order(napping, "/admin/sleep", mode="wait").json()["level"] == 1
    thread.join()
    assert answers[0].status_code == 200
    assert len(answers[0].json()["choices"][0]["text"]) == _SLOW_TOKENS
    order(napping, "/admin/wake")


def test_running_requests_can_be_aborted(napping: Server) -> None:
    answers: list[Any] = []
    thread = start_slow(napping, answers)
    assert order(napping, "/admin/sleep", mode="abort").json()["level"] == 1
    thread.join()
    assert answers[0].status_code == 503
    assert "put to sleep" in answers[0].json()["error"]["message"]
    order(napping, "/admin/wake")
    assert napping.complete(max_tokens=2).status_code == 200


def test_the_ledger_of_blocks(ending: Server) -> None:
    ending.complete(prompt="y" * 64, max_tokens=1)
    assert order(ending, "/reset_prefix_cache").json()["num_blocks"] > 0
    assert order(ending, "/admin/reset_prefix_cache").json()["num_blocks"] == 0
    ending.complete(prompt="x" * 40, max_tokens=1)
    blocks = ending.http.get("/memory").json()["blocks"]
    assert blocks["cached"] == {"blocks": 2, "bytes": 2 * 1024}
    assert blocks["used"]["blocks"] == 0
    assert blocks["free"]["blocks"] == 4096 - 2
    thread = start_slow(ending, [])
    blocks = ending.http.get("/memory").json()["blocks"]
    thread.join()
    assert blocks["used"]["blocks"] > 0
    assert 0 <= blocks["unfilled"]["tokens"] <= 16
