"""Fair share through a real server: a flood of one key, and a few requests of another."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import httpx
import pytest

from tests.serve.conftest import Server, wait_until
from tests.serve.test_tenants import bearer, write_tenants
from tests.serve.tiny_model import serving, write_tiny_model
from windlass.core.trace import RequestTrace

NUM_FLOOD, NUM_OTHER = 200, 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@contextmanager
def server_of(model: Path, folder: Path, *, fair_share: bool) -> Iterator[Server]:
    tenants = {"boss": {"admin": True}, "flood": {}, "other": {}}
    keys_file = write_tenants(folder / "keys.json", tenants)
    options = {"max_num_seqs": 4, "num_threads": 1, "fair_share": fair_share}
    with serving(model, serve={"keys_file": keys_file, "hang_timeout": 0.0}, **options) as server:
        server.http.headers.update(bearer("boss"))
        yield server


def ends_of(server: Server, round_: str) -> list[str]:
    """The tenants of all requests in the order in which the engine ends them.

    The engine is stopped until all requests are on their way: first the flood, then the others.
    """
    ended: list[str] = []
    on_traces, pid = server.client.on_traces, server.client.replicas[0].pid
    assert on_traces is not None
    assert pid is not None

    def keep(replica: int, traces: list[RequestTrace]) -> None:
        ended.extend(each.request_id.split("-")[1] for each in traces)
        on_traces(replica, traces)

    async def send_all() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=120) as http:

            def send(tenant: str, index: int) -> asyncio.Task[httpx.Response]:
                body = {"prompt": f"{tenant} {index} {round_}", "max_tokens": 8, "ignore_eos": True}
                body["request_id"] = f"{tenant}-{round_}-{index}"
                request = http.post("/v1/completions", json=body, headers=bearer(tenant))
                return asyncio.create_task(request)

            async def all_are_sent(count: int) -> None:
                while server.client.num_in_flight < count:
                    await asyncio.sleep(0.01)

            sent = [send("flood", index) for index in range(NUM_FLOOD)]
            await all_are_sent(NUM_FLOOD)
            sent += [send("other", index) for index in range(NUM_OTHER)]
            await all_are_sent(NUM_FLOOD + NUM_OTHER)
            os.kill(pid, signal.SIGCONT)
            assert {each.status_code for each in await asyncio.gather(*sent)} == {200}

    server.client.on_traces = keep
    os.kill(pid, signal.SIGSTOP)
    try:
        asyncio.run(send_all())
    finally:
        os.kill(pid, signal.SIGCONT)
        server.client.on_traces = on_traces
    assert len(ended) == NUM_FLOOD + NUM_OTHER
    return ended


def num_flood_before(ended: list[str]) -> list[int]:
    """For each request of the other tenant: how many of the flood ended before it."""
    counts = accumulate(tenant == "flood" for tenant in ended)
    return [count for tenant, count in zip(ended, counts, strict=True) if tenant == "other"]


def test_a_flood_takes_its_share_only(model: Path, tmp_path: Path) -> None:
    with server_of(model, tmp_path, fair_share=True) as server:
        before = num_flood_before(ends_of(server, "equal"))
        # One of the flood for each of the others, and at most the slots more.
        assert all(index - 4 <= count <= index + 4 for index, count in enumerate(before, 1))
        assert server.metric("tenant_fairness_jain") > 0.9
        outcomes = {"outcome": "success"}
        wait_until(
            lambda: server.metric("tenant_requests_total", tenant="flood", **outcomes) == NUM_FLOOD
        )
        assert server.metric("tenant_requests_total", tenant="other", **outcomes) == NUM_OTHER

        changed = server.http.patch("/admin/tenants/other", json={"weight": 3})
        assert changed.status_code == 200
        before = num_flood_before(ends_of(server, "weighted"))
        assert all(count <= index / 3 + 5 for index, count in enumerate(before, 1))


def test_without_fair_share_the_flood_comes_first(model: Path, tmp_path: Path) -> None:
    with server_of(model, tmp_path, fair_share=False) as server:
        before = num_flood_before(ends_of(server, "equal"))
        assert before[0] >= NUM_FLOOD - 4
        assert server.metric("tenant_fairness_jain") < 0.9
