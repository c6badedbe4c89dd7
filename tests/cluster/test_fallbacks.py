"""Fallbacks in a fleet on a real Ray: another model answers what a model cannot answer in time.

Run with `make test-cluster`, which installs Ray; without it, these tests are skipped.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.cluster.running import ENGINE, Running, running
from tests.serve.conftest import wait_until

pytest.importorskip("ray", reason="make test-cluster installs Ray")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own, of its sockets and threads

ANN, STRICT = "wl-key-of-ann", "wl-key-of-strict"


@pytest.fixture(scope="module")
def fleet(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("fallbacks")
    tenants = {
        name: {"keys": [{"sha256": hashlib.sha256(key.encode()).hexdigest()}], **fields}
        for name, key, fields in (("ann", ANN, {}), ("strict", STRICT, {"fallback": "none"}))
    }
    (folder / "keys.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    (folder / "keys.yaml").chmod(0o600)
    common = {"model": str(tiny_model), "cpus": 0.4}
    document = {
        "tenants": "keys.yaml",
        "ingress": {"cpus": 0.2},
        "serve": {"max_num_queued_reqs": 1, "fallback_wait_ms": 1},
        "models": [
            {
                "name": "solo",
                "options": {**ENGINE, "max_num_seqs": 1},
                "fallbacks": [{"model": "tiny", "max_tokens": 5}, {"max_tokens": 3}],
                **common,
            },
            {"name": "tiny", "options": ENGINE, **common},
        ],
    }
    with running(document, folder, ANN) as found:
        yield found


def ask(
    fleet: Running, key: str = ANN, give_up_s: float | None = None, **fields: Any
) -> httpx.Response:
    """`give_up_s`: a request that has no answer then has the status 499."""
    body = {"model": "solo", "prompt": "Hi", "max_tokens": 8, "ignore_eos": True, **fields}
    headers = {"Authorization": f"Bearer {key}"}
    try:
        return fleet.http.post(
            "/v1/completions", json=body, headers=headers, timeout=give_up_s or 120
        )
    except httpx.ReadTimeout:
        if give_up_s is None:
            raise
        return httpx.Response(499)


def reason_of(response: httpx.Response) -> str | None:
    return response.headers.get("X-Windlass-Fallback")


def shown(response: httpx.Response) -> tuple[str, int, str | None]:
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["model"], answer["usage"]["completion_tokens"], reason_of(response)


@contextmanager
def streams(fleet: Running, number: int) -> Iterator[None]:
    """Requests of solo that last: the first one runs, and the others wait."""
    body = {"model": "solo", "prompt": "Hi", "max_tokens": 30_000, "ignore_eos": True}
    with ExitStack() as stack:
        for index in range(number):
            client = stack.enter_context(
                httpx.Client(base_url=fleet.url, timeout=60, headers=fleet.http.headers)
            )
            sent = {**body, "stream": True, "fallback": "none"}
            if index == 0:
                first = stack.enter_context(client.stream("POST", "/v1/completions", json=sent))
                lines = first.iter_lines()  # a closed generator would end the stream
                next(lines)
            else:
                thread = threading.Thread(target=_send, args=(client, sent))
                thread.start()
                stack.callback(thread.join, 60)
                stack.callback(client.close)
        wait_until(lambda: _num_waiting(fleet) == number - 1)
        yield
        first.close()
    wait_until(lambda: all(each.stats.num_running == 0 for each in fleet.snapshots("solo")))


def _send(client: httpx.Client, body: dict[str, Any]) -> None:
    """Send a request that the test ends by closing the client.

    The ingress refuses it while the last report still has the requests of the test before.
    """
    status = 429
    while status == 429:
        try:
            with client.stream("POST", "/v1/completions", json=body) as response:
                status = response.status_code
                next(response.iter_raw())
        except (httpx.HTTPError, RuntimeError):
            return
        time.sleep(0.1)


def _num_waiting(fleet: Running) -> int:
    return sum(each.stats.num_waiting for each in fleet.snapshots("solo"))


def metric(fleet: Running, name: str, **labels: str) -> float:
    total = 0.0
    for line in fleet.http.get("/metrics").text.splitlines():
        head, _, value = line.rpartition(" ")
        if head.startswith(f"windlass:{name}{{") and all(
            f'{key}="{text}"' in head for key, text in labels.items()
        ):
            total += float(value)
    return total


def test_a_long_queue_is_answered_by_the_next_model(fleet: Running) -> None:
    assert shown(ask(fleet)) == ("solo", 8, None)
    before = metric(fleet, "request_fallbacks_total", model_name="solo", fallback_model="tiny")
    with streams(fleet, 2):
        wait_until(lambda: reason_of(ask(fleet, fallback="auto", give_up_s=5)) == "wait")
        found = ask(fleet, fallback="auto")
        assert shown(found) == ("tiny", 5, "wait")
        # The prediction may be shorter than the wait.
        wait_until(lambda: reason_of(ask(fleet, deadline_ms=3000, give_up_s=5)) == "deadline")
        wait_until(lambda: reason_of(ask(fleet, give_up_s=5)) == "queue_full")
        for refused in (ask(fleet, STRICT, fallback="auto"), ask(fleet, fallback="none")):
            assert refused.status_code == 429
    after = metric(fleet, "request_fallbacks_total", model_name="solo", fallback_model="tiny")
    assert after >= before + 3
    explained = fleet.http.get(f"/v1/requests/{found.json()['id']}/explain").json()
    assert explained["fallback"] == {"reason": "wait", "model": "tiny"}
    assert explained["completions"][0]["output_tokens"] == 5


def test_without_a_replica_the_next_model_answers(fleet: Running) -> None:
    (victim,) = fleet.snapshots("solo")
    os.kill(victim.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: metric(fleet, "engine_up", model_name="solo") == 0)
        assert shown(ask(fleet)) == ("tiny", 5, "unavailable")
        assert fleet.http.get("/health").json()["status"] == "degraded"
    finally:
        os.kill(victim.pid, signal.SIGKILL)
    wait_until(lambda: shown(ask(fleet))[0] == "solo")


def test_a_request_that_ends_engines_is_not_sent_on(fleet: Running) -> None:
    answers: list[httpx.Response] = []
    poison = {"prompt": "A request that ends engines.", "max_tokens": 30_000}
    thread = threading.Thread(target=lambda: answers.append(ask(fleet, **poison)))
    (other,) = fleet.snapshots("tiny")
    thread.start()
    killed: set[int | None] = {None}  # no engine
    for _ in range(2):

        def runs_anew() -> bool:
            (found,) = fleet.snapshots("solo")
            return found.stats.num_running == 1 and found.engine_pid not in killed

        wait_until(runs_anew)
        (victim,) = fleet.snapshots("solo")
        killed.add(victim.engine_pid)
        os.kill(victim.engine_pid, signal.SIGKILL)
    thread.join(60)
    # The engine of solo is being restarted: tiny would answer another request, and not this one.
    later = [ask(fleet, **poison, **each) for each in ({}, {"fallback": "auto"}, {"model": "tiny"})]
    for answer in (*answers, *later):
        assert answer.status_code == 422, answer.text
        assert answer.json()["error"]["code"] == "request_blocked"
    assert len(answers) == 1
    (found,) = fleet.snapshots("tiny")
    assert found.engine_pid == other.engine_pid
    assert found.stats.num_generated_tokens == other.stats.num_generated_tokens
    wait_until(lambda: shown(ask(fleet))[0] == "solo")
