"""Accounting: the step time of requests, blockers, and prefix cache misses."""

from __future__ import annotations

from collections import defaultdict
from random import Random

import pytest

from tests.core.test_worlds import random_world
from tests.core.world import World, limits, request
from tests.lora.shelf import FakeShelf
from windlass.core import misses
from windlass.core.adapters import Adapters
from windlass.core.policy import Static
from windlass.core.sampling import SamplingParams
from windlass.core.trace import (
    ADAPTER,
    BATCH,
    BLOCKERS,
    BLOCKS,
    PREFIX,
    SEQUENCES,
    TOKENS,
    RequestTrace,
)
from windlass.core.types import NewRequest, StepPlan, StepResult


class Ledger:
    """Attributes every step to its rows one by one: the definition, computed beside the scheduler."""

    def __init__(self, world: World, rng: Random) -> None:
        self.world = world
        self.rng = rng
        self.expected: defaultdict[str, float] = defaultdict(float)
        self.idle = 0.0
        self.began = self.mark = world.now = 100.0
        self.ended: set[str] = set()
        self.planned: list[float] = []
        world.scheduler.accounting.start(world.now)
        self._plan, self._commit = world.scheduler.plan, world.scheduler.commit
        world.scheduler.plan = self.plan  # type: ignore[method-assign]
        world.scheduler.commit = self.commit  # type: ignore[method-assign]

    def tick(self) -> float:
        self.world.now += self.rng.random()
        return self.world.now

    def plan(self, _now: float) -> StepPlan:
        now = self.tick()
        self.planned.append(now)
        if not self.world.scheduler._running and not self.world.scheduler._in_flight:
            self.idle += now - self.mark
            self.mark = now
        return self._plan(now)

    def commit(self, plan: StepPlan, result: StepResult, _now: float) -> list:
        now = self.tick()
        unit = (now - self.mark) / plan.num_tokens
        self.mark = now
        for row in plan.rows:
            if row.request_id in self.ended:
                self.idle += row.num_tokens * unit
            else:
                self.expected[row.request_id] += row.num_tokens * unit
        outputs = self._commit(plan, result, now)
        self.ended.update(output.request_id for output in outputs if output.finish)
        return outputs


@pytest.mark.parametrize("seed", range(60))
def test_request_times_and_idle_time_add_up_to_the_total(seed: int) -> None:
    world, requests, ahead = random_world(seed)
    rng = Random(seed)
    ledger = Ledger(world, rng)
    for item in requests:
        world.add(item)
        for _ in range(rng.randint(0, 3)):
            world.step()
        if rng.random() < 0.2:
            victim = rng.choice(requests).request_id
            if victim in world.got and victim not in world.finish:
                world.scheduler.abort(victim, ledger.tick())
                ledger.ended.add(victim)
    world.finish_all(ahead=ahead)
    traces = {trace.request_id: trace for trace in world.scheduler.accounting.traces}
    assert set(traces) == {item.request_id for item in requests}
    for name, trace in traces.items():
        assert trace.prefill_s + trace.decode_s == pytest.approx(ledger.expected[name])
        assert min(trace.prefill_s, trace.decode_s) > -1e-9
        assert min(trace.blocked_s) > -1e-9
        assert trace.timeline.arrived <= trace.ended
    account = world.scheduler.stats(ledger.tick()).account
    shares = sum(trace.prefill_s + trace.decode_s for trace in traces.values())
    assert account.prefill_s + account.decode_s == pytest.approx(shares)
    assert shares + account.idle_s == pytest.approx(world.now - ledger.began)


@pytest.mark.parametrize("seed", range(60, 90))
def test_queued_time_has_a_blocker(seed: int) -> None:
    """Queued time has a blocker, except the time before the first plan after arrival."""
    world, requests, _ = random_world(seed)
    ledger = Ledger(world, Random(seed))
    for item in requests:
        world.add(item)
    world.finish_all()
    for trace in world.scheduler.accounting.traces:
        times = trace.timeline
        assert times.admitted is not None
        waited = times.admitted - ledger.planned[0] + trace.waited_again_s
        assert sum(trace.blocked_s) == pytest.approx(waited)
    assert ledger.idle > 0


def traces_of(world: World) -> dict[str, RequestTrace]:
    return {trace.request_id: trace for trace in world.scheduler.accounting.traces}


def blocker(trace: RequestTrace) -> int:
    return max(range(len(trace.blocked_s)), key=trace.blocked_s.__getitem__)


def test_a_request_without_a_slot_is_blocked_by_sequences() -> None:
    world = World(limits(max_num_seqs=1, num_blocks=64))
    for name in "abc":
        world.add(request(name, [1, 2], max_tokens=5, ignore_eos=True))
    world.finish_all()
    traces = traces_of(world)
    assert traces["a"].blocked_s == (0.0,) * len(BLOCKERS)
    assert blocker(traces["c"]) == SEQUENCES
    assert (traces["c"].num_ahead, traces["c"].num_running) == (2, 0)


def test_a_request_beside_full_steps_is_blocked_by_tokens() -> None:
    world = World(limits(max_num_batched_tokens=8, num_blocks=64))
    world.add(request("long", [1] * 30, max_tokens=2, ignore_eos=True))
    world.add(request("next", [2] * 5, max_tokens=2, ignore_eos=True))
    world.finish_all()
    traces = traces_of(world)
    assert blocker(traces["next"]) == TOKENS
    chunks = traces["long"].chunks
    assert [(chunk.start, chunk.num_tokens) for chunk in chunks] == [
        (0, 8),
        (8, 8),
        (16, 8),
        (24, 6),
    ]
    assert [chunk.step_tokens for chunk in chunks] == [8, 8, 8, 8]
    assert [chunk.step_rows for chunk in chunks] == [1, 1, 1, 2]


def test_a_request_without_blocks_reports_the_shortage() -> None:
    world = World(limits(max_num_batched_tokens=64, num_blocks=8))
    world.add(request("a", [1] * 16, max_tokens=8, ignore_eos=True))
    world.step()
    world.add(request("b", [2] * 18, max_tokens=2, ignore_eos=True))
    world.finish_all()
    trace = traces_of(world)["b"]
    assert blocker(trace) == BLOCKS
    assert trace.short_blocks == 5 + 1 - 2  # its own and one to grow, less two that were free


def test_static_batching_is_a_blocker() -> None:
    world = World(limits(num_blocks=64), options={"gate": Static(1, 0.0)})
    for name in "ab":
        world.add(request(name, [1, 2], max_tokens=5, ignore_eos=True))
    world.finish_all()
    assert blocker(traces_of(world)["b"]) == BATCH


def test_adapters_and_shared_prefixes_are_blockers() -> None:
    shelf = FakeShelf(["slow"], delay=4)
    world = World(
        limits(max_num_batched_tokens=64, num_blocks=64),
        options={"adapters": Adapters(1, shelf)},
    )
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    world.add(NewRequest("adapted", [1, 2, 3], sampling, adapter="slow"))
    world.add(NewRequest("first", [3] * 20, sampling))
    world.add(NewRequest("second", [3] * 20, sampling))
    world.finish_all()
    traces = traces_of(world)
    assert blocker(traces["adapted"]) == ADAPTER
    assert blocker(traces["second"]) == PREFIX
    assert sum(traces["first"].blocked_s) == 0


def test_the_queue_is_counted_by_reason() -> None:
    world = World(
        limits(max_num_seqs=2, max_num_batched_tokens=64, num_blocks=64),
        options={"adapters": Adapters(1, FakeShelf(["slow"], delay=9))},
    )
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    assert world.scheduler.stats().waiting_by_reason == {}
    world.add(NewRequest("adapted", [1, 2, 3], sampling, adapter="slow"))
    world.add(NewRequest("first", [3] * 20, sampling))
    world.add(NewRequest("second", [3] * 20, sampling))
    assert world.scheduler.stats().waiting_by_reason == {"next step": 3}
    world.step()
    assert world.scheduler.stats().waiting_by_reason == {"adapter": 1, "shared prefix": 1}
    world.scheduler.abort("adapted")
    assert world.scheduler.stats().waiting_by_reason == {"shared prefix": 1}
    world.add(NewRequest("third", [5], sampling))
    world.step()
    world.add(NewRequest("fourth", [6], sampling))
    world.add(NewRequest("fifth", [7], sampling))
    world.step()
    stats = world.scheduler.stats()
    assert stats.num_running == 2
    assert stats.waiting_by_reason == {"sequences": stats.num_waiting}


def test_a_preempted_request_reports_its_cost() -> None:
    world = World(limits(num_blocks=9, max_num_batched_tokens=32), caching=False)
    for name in "ab":
        world.add(request(name, [1] * 12, max_tokens=16, ignore_eos=True))
    world.finish_all()
    trace = traces_of(world)["b"]
    assert trace.timeline.num_preemptions == 1
    assert trace.num_recomputed > 12
    assert trace.waited_again_s > 0
    assert blocker(trace) == BLOCKS


def test_batch_sizes_of_decode_steps_are_recorded() -> None:
    world = World(limits(num_blocks=64))
    world.add(request("a", [1], max_tokens=12, ignore_eos=True))
    for _ in range(3):
        world.step()
    world.add(request("b", [2], max_tokens=2, ignore_eos=True))
    world.finish_all()
    traces = traces_of(world)
    assert traces["a"].batch == (1, 1, 2)
    assert traces["b"].batch == (2, 2, 2)


def test_draft_tokens_are_counted_by_draft_length() -> None:
    world = World(limits(num_blocks=64), draft_length=3)
    world.add(request("a", [1, 2], max_tokens=30, ignore_eos=True))
    world.finish_all()
    trace = traces_of(world)["a"]
    drafted = sum(count * number for number, count in enumerate(trace.drafted))
    accepted = sum(count * number for number, count in enumerate(trace.accepted))
    assert drafted == trace.timeline.num_drafted > 0
    assert accepted == trace.timeline.num_accepted > 0
    assert sum(trace.drafted) == sum(trace.accepted)


def miss_of(world: World, name: str, prompt: list[int], **more: object) -> tuple[int | None, str]:
    adapter, salt = str(more.pop("adapter", "")), str(more.pop("cache_salt", ""))
    sampling = SamplingParams(max_tokens=1, **more)  # type: ignore[arg-type]
    world.add(NewRequest(name, prompt, sampling, cache_salt=salt, adapter=adapter))
    world.finish_all()
    trace = traces_of(world)[name]
    return trace.first_miss, trace.why_missed


def test_reasons_of_prefix_cache_misses() -> None:
    world = World(limits(num_blocks=8, max_num_batched_tokens=64))
    prompt = [1, 2, 3, 4] * 4
    assert miss_of(world, "new", prompt) == (0, misses.NEVER)
    assert miss_of(world, "again", prompt) == (None, "")
    assert miss_of(world, "longer", [*prompt, 1, 1]) == (16, misses.PARTIAL)
    assert miss_of(world, "other end", [*prompt[:8], 2, 2, 2, 2, 0]) == (8, misses.NEVER)
    assert miss_of(world, "scored", prompt, prompt_logprobs=0) == (0, misses.SCORED)
    assert miss_of(world, "fixed", prompt, deterministic=True) == (0, misses.SALT)
    # A miss does not reveal another tenant's prompts.
    assert miss_of(world, "stranger", prompt, cache_salt="b") == (0, misses.NEVER)
    miss_of(world, "flood", [4] * 29)
    assert miss_of(world, "late", prompt) == (0, misses.EVICTED)


def test_the_trace_of_a_running_request_is_available() -> None:
    world = World(limits(max_num_seqs=1, num_blocks=64))
    for name in "ab":
        world.add(request(name, [1, 2], max_tokens=5, ignore_eos=True))
    world.step()
    world.step()
    running = world.scheduler.trace("a", world.now)
    waiting = world.scheduler.trace("b", world.now)
    assert running is not None
    assert (running.finish, running.timeline.num_output) == (None, 2)
    assert waiting is not None
    assert waiting.blocked_s[SEQUENCES] == pytest.approx(0.01)
    assert world.scheduler.trace("c", world.now) is None
