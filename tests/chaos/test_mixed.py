"""Good requests among disconnecting clients and malformed bodies; benchmarks/scripts/chaos.py sends more."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
from chaos import send_all, shuffled
from fault_load import HANG_S, Oracle, account, make_jobs, write_model

from tests.serve.conftest import wait_until
from tests.serve.tiny_model import serving

NUM_GOOD = 120


def test_every_good_answer_is_right(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    options = {"load_format": "dummy", "served_model_name": ("tiny",), "max_model_len": 512}

    async def send(url: str) -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=url, timeout=HANG_S, limits=limits) as http:
            oracle = Oracle(make_jobs(20))
            await oracle.learn(http)
            tally, statuses = await send_all(http, oracle, shuffled(NUM_GOOD, 30, 15), 16)
            assert dict(tally.outcomes) == {"right": NUM_GOOD}, tally.problems
            assert all(400 <= status < 500 for status in statuses), statuses
            accounted = await account(http)
            assert accounted["received"] == accounted["ended"]
            assert accounted["success"] >= NUM_GOOD + len(oracle.jobs)

    with serving(model, **options) as server:
        asyncio.run(send(server.url))
        wait_until(lambda: server.client.replicas[0].stats.num_used_blocks == 0)
        assert server.client.num_in_flight == 0
