"""/health/generate: one probe at a time, shared by its callers, ahead of the queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.core.schedulers import make_scheduler
from tests.serve.conftest import running, wait_until
from tests.serve.fakes import CARD, Options, counting
from windlass.core.blocks import BlockPool
from windlass.core.kv_layout import KVLayout
from windlass.core.limits import SchedulerLimits
from windlass.core.policy import Fcfs, Policy, Priority
from windlass.core.sampling import SamplingParams
from windlass.core.types import PROBE_PRIORITY, EngineStats, NewRequest, Output
from windlass.errors import WorkerDied
from windlass.serve.probe import GenerateProbe


class Engine:
    """A fake replica; a token arrives when `token` is set."""

    index = 0

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.token = asyncio.Event()
        self.error: Exception | None = None
        self.requests: list[NewRequest] = []
        self.num_open = 0

    async def generate(self, request: NewRequest, tracked: bool) -> AsyncGenerator[Output, None]:
        assert not tracked
        self.requests.append(request)
        self.num_open += 1
        try:
            await self.token.wait()
            if self.error is not None:
                raise self.error
            yield Output(request.request_id, [1], finish="length")
        finally:
            self.num_open -= 1


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def probe_of(engine: Engine, clock: Clock) -> GenerateProbe:
    return GenerateProbe(engine, CARD.tokenizer, clock)  # type: ignore[arg-type]


def test_callers_share_one_probe() -> None:
    async def main() -> None:
        engine, clock = Engine(), Clock()
        probe = probe_of(engine, clock)
        callers = [asyncio.create_task(probe.run()) for _ in range(50)]
        while not engine.requests:
            await asyncio.sleep(0)
        callers.pop().cancel()  # a disconnected caller does not affect the others
        engine.token.set()
        results = await asyncio.gather(*callers)
        assert {result.error for result in results} == {None}
        assert [request.priority for request in engine.requests] == [PROBE_PRIORITY]

    asyncio.run(main())


def test_a_success_is_reused_for_one_second_but_not_a_failure() -> None:
    async def main() -> None:
        engine, clock = Engine(), Clock()
        probe = probe_of(engine, clock)
        engine.token.set()
        for clock.now, num_probes in [(0.0, 1), (0.9, 1), (1.1, 2), (1.5, 2)]:
            assert (await probe.run()).error is None
            assert len(engine.requests) == num_probes
        engine.error = WorkerDied("the engine died")
        for clock.now, num_probes in [(3.0, 3), (3.1, 4)]:
            assert (await probe.run()).error == "the engine died"
            assert len(engine.requests) == num_probes

    asyncio.run(main())


def test_without_a_free_slot_other_tokens_count() -> None:
    async def main() -> None:
        engine = Engine()
        probe = probe_of(engine, Clock())
        running = asyncio.create_task(probe.run())
        while not engine.requests:
            await asyncio.sleep(0)
        engine.stats = EngineStats(num_running=4, num_waiting=200, num_generated_tokens=7)
        assert (await running).error is None
        await asyncio.sleep(0)
        assert engine.num_open == 0  # the probe request was aborted

    asyncio.run(main())


@pytest.mark.parametrize(
    "stats",
    [
        EngineStats(num_running=4, num_waiting=200),  # no progress
        EngineStats(num_running=4, num_generated_tokens=7),  # the probe has a slot
    ],
)
def test_an_engine_without_tokens_fails_the_probe(stats: EngineStats) -> None:
    async def main() -> None:
        engine, clock = Engine(), Clock()
        probe = probe_of(engine, clock)
        running = asyncio.create_task(probe.run())
        while not engine.requests:
            await asyncio.sleep(0)
        engine.stats, clock.now = stats, 11.0
        assert (await running).error == "no token arrived within 10 s"

    asyncio.run(main())


@pytest.mark.parametrize("policy", [Fcfs(), Priority()])
def test_a_probe_goes_first_under_every_policy(policy: Policy) -> None:
    limits = SchedulerLimits(
        max_num_seqs=1,
        max_num_batched_tokens=64,
        max_model_len=64,
        layout=KVLayout.unsized(16),
        num_blocks=8,
    )
    scheduler = make_scheduler(limits, BlockPool(8), policy=policy)
    priorities: dict[str, int] = {"first": 0, "urgent": -(2**31) + 1, "probe": PROBE_PRIORITY}
    for name, priority in priorities.items():
        scheduler.add(NewRequest(name, [1], SamplingParams(), priority=priority), now=0.0)
    assert [row.request_id for row in scheduler.plan(0.0).rows] == ["probe"]


def test_a_full_queue_does_not_fail_the_probe() -> None:
    """One slot, occupied for longer than the probe's timeout, and 200 queued requests."""
    body = {"prompt": "SLOW", "max_tokens": 2000, "n": 100}
    with (
        ThreadPoolExecutor(2) as pool,
        running(counting(Options(max_num_seqs=1)), shutdown_timeout=0.0) as server,
    ):
        url = f"{server.url}/v1/completions"
        posts = [pool.submit(httpx.post, url, json=body, timeout=60) for _ in range(2)]
        wait_until(lambda: server.client.replicas[0].stats.num_waiting >= 199)
        responses = [server.http.get("/health/generate") for _ in range(3)]
        assert [response.json()["status"] for response in responses] == ["ok"] * 3
        assert not any(post.done() for post in posts)
