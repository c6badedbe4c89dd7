"""Sleep mode: refused requests, reported state, and serving again after waking."""

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


def post_admin(server: Server, path: str, **body: object) -> httpx.Response:
    return server.http.post(path, headers=ADMIN, json=body or None)


@pytest.fixture(scope="module")
def sleepable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("sleep") / "asleep"
    with running(counting(Options(sleep_file=str(file))), admin_key=("boss",)) as server:
        yield server


@pytest.fixture(scope="module")
def restarting() -> Iterator[Server]:
    """A server whose engine releases memory only by ending its process."""
    with running(counting(Options(step_s=0.002)), admin_key=("boss",)) as server:
        yield server


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


def test_level_one_keeps_the_process(sleepable: Server) -> None:
    before, pid = (
        sleepable.complete(max_tokens=5).json()["choices"],
        sleepable.client.replicas[0].pid,
    )
    result = post_admin(sleepable, "/admin/sleep", level=1).json()
    assert (result["status"], result["level"], result["reason"]) == ("sleeping", 1, "")
    check_asleep(sleepable)
    assert sleepable.metric("engine_sleep_state", sleep_state="weights_offloaded") == 1
    report = sleepable.http.get("/memory").json()
    assert report["parts"]["weights"] == {"num_bytes": 1000, "resident": 0}
    assert post_admin(sleepable, "/admin/wake").json()["level"] == 0
    assert sleepable.complete(max_tokens=5).json()["choices"] == before
    assert sleepable.client.replicas[0].pid == pid
    assert sleepable.metric("engine_sleep_state", sleep_state="awake") == 1


def test_vllm_paths_are_aliases(sleepable: Server) -> None:
    assert sleepable.http.post("/sleep?level=1", headers=ADMIN).json()["status"] == "sleeping"
    assert sleepable.http.post("/sleep?level=1", headers=ADMIN).json()["seconds"] == 0
    check_asleep(sleepable)
    assert sleepable.http.post("/wake_up", headers=ADMIN).json()["status"] == "awake"
    assert sleepable.http.post("/wake_up", headers=ADMIN).json()["reason"] == "the server is awake"
    assert sleepable.complete(max_tokens=2).status_code == 200


def test_bad_fields_and_missing_admin_keys_are_refused(sleepable: Server) -> None:
    for query in ("level=3", "level=x", "mode=gently", "levle=1"):
        response = sleepable.http.post(f"/sleep?{query}", headers=ADMIN)
        assert response.status_code == 400, query
        assert response.json()["error"]["param"] in ("level", "mode", "levle")
    for path in ("/admin/sleep", "/admin/wake", "/admin/reset_prefix_cache", "/sleep", "/wake_up"):
        refused = sleepable.http.post(path)
        assert refused.status_code == 403, path
    assert sleepable.http.get("/is_sleeping").json() == {"is_sleeping": False}


def test_level_one_stops_the_process_if_memory_cannot_be_released(restarting: Server) -> None:
    before, pid = (
        restarting.complete(max_tokens=5).json()["choices"],
        restarting.client.replicas[0].pid,
    )
    result = post_admin(restarting, "/admin/sleep", level=1).json()
    assert result["level"] == 2
    assert "process was stopped" in result["reason"]
    assert restarting.client.replicas[0].pid is None
    assert not Path(f"/proc/{pid}").exists()
    check_asleep(restarting)
    assert restarting.http.get("/metrics").status_code == 200
    assert post_admin(restarting, "/admin/reset_prefix_cache").status_code == 503
    assert post_admin(restarting, "/admin/wake").json()["seconds"] > 0
    assert restarting.complete(max_tokens=5).json()["choices"] == before
    assert restarting.client.replicas[0].pid != pid
    assert restarting.http.get("/health").json() == {"status": "ok"}


_SLOW_TOKENS = 150  # 10 ms each: longer than the admin calls take on a busy machine


def start_slow(server: Server, responses: list[Any]) -> threading.Thread:
    def send() -> None:
        responses.append(server.complete(prompt="SLOW", max_tokens=_SLOW_TOKENS))

    thread = threading.Thread(target=send)
    thread.start()
    wait_until(lambda: server.http.get("/load").json()["num_requests_running"] == 1)
    return thread


def test_sleep_waits_for_running_requests(sleepable: Server) -> None:
    responses: list[Any] = []
    thread = start_slow(sleepable, responses)
    refused = post_admin(sleepable, "/admin/sleep", mode="refuse")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "busy")
    late = post_admin(sleepable, "/admin/sleep", mode="wait", timeout_s=0.05)
    assert late.status_code == 409
    assert "stays awake" in late.json()["error"]["message"]
    assert post_admin(sleepable, "/admin/sleep", mode="wait").json()["level"] == 1
    thread.join()
    assert responses[0].status_code == 200
    assert len(responses[0].json()["choices"][0]["text"]) == _SLOW_TOKENS
    post_admin(sleepable, "/admin/wake")


def test_running_requests_can_be_aborted(sleepable: Server) -> None:
    responses: list[Any] = []
    thread = start_slow(sleepable, responses)
    assert post_admin(sleepable, "/admin/sleep", mode="abort").json()["level"] == 1
    thread.join()
    assert responses[0].status_code == 503
    assert "put to sleep" in responses[0].json()["error"]["message"]
    post_admin(sleepable, "/admin/wake")
    assert sleepable.complete(max_tokens=2).status_code == 200


def test_memory_report_of_blocks(restarting: Server) -> None:
    restarting.complete(prompt="y" * 64, max_tokens=1)
    assert post_admin(restarting, "/reset_prefix_cache").json()["num_blocks"] > 0
    assert post_admin(restarting, "/admin/reset_prefix_cache").json()["num_blocks"] == 0
    restarting.complete(prompt="x" * 40, max_tokens=1)
    blocks = restarting.http.get("/memory").json()["blocks"]
    assert blocks["cached"] == {"blocks": 2, "bytes": 2 * 1024}
    assert blocks["used"]["blocks"] == 0
    assert blocks["free"]["blocks"] == 4096 - 2
    thread = start_slow(restarting, [])
    blocks = restarting.http.get("/memory").json()["blocks"]
    thread.join()
    assert blocks["used"]["blocks"] > 0
    assert 0 <= blocks["unfilled"]["tokens"] <= 16
