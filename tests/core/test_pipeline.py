"""Plans for pipeline stages: the same tokens as one stage, and no stage idles."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import count
from random import Random

import pytest

from tests.core.test_worlds import random_world
from tests.core.world import FakeRunner, World, limits, plain_loop, request
from windlass.core.types import StepPlan, StepResult
from windlass.engine import Engine


class Stages:
    """Stages that each compute all plans in order, as far behind each other as `rng` lets them be.

    Each has pages of its own, so a block that is handed out too early for one stage fails there.
    """

    def __init__(self, world: World, num_stages: int, rng: Random) -> None:
        self.world = world
        self.rng = rng
        first = world.runner
        self.stages = [
            FakeRunner(first.num_blocks, first.layout, Random(0), first.draft_length)
            for _ in range(num_stages)
        ]
        self.queues: list[deque] = [deque() for _ in range(num_stages)]
        self.results: dict[int, StepResult] = {}

    def submit(self, plan: StepPlan) -> Pending:
        assert all(row.tokens for row in plan.rows), "the first stage does not know the token"
        pool = self.world.pool
        free = [block for block in pool._free if pool._hash_of[block] is None]
        self.queues[0].append((plan, free))
        while self.rng.random() < 0.7:
            self.advance(self.rng.randrange(len(self.stages)))
        return Pending(self, plan.step)

    def advance(self, stage: int) -> None:
        """Let a stage compute its next plan, if one has arrived."""
        if not self.queues[stage]:
            return
        plan, free = self.queues[stage].popleft()
        self.stages[stage].poison(free)
        result = self.stages[stage].run(plan)
        if stage + 1 < len(self.stages):
            self.queues[stage + 1].append((plan, free))
        else:
            self.results[plan.step] = result


class Pending:
    def __init__(self, stages: Stages, step: int) -> None:
        self._stages = stages
        self._step = step

    def wait(self) -> StepResult:
        stages = self._stages
        while self._step not in stages.results:
            stages.advance(stages.rng.randrange(len(stages.stages)))
        return stages.results.pop(self._step)


def pipelined_world(seed: int, num_stages: int) -> tuple[World, list]:
    world, requests, _ = random_world(seed)
    in_flight = max(2, num_stages) * world.limits.max_num_batched_tokens
    longest, layout = world.limits.max_model_len, world.limits.layout
    num_blocks = max(world.limits.num_blocks, layout.blocks_for(longest, in_flight))
    found = replace(world.limits, num_stages=num_stages, num_blocks=num_blocks)
    return World(found, world.caching, world.draft_length, world.options), requests


@pytest.mark.parametrize("seed", range(150))
def test_stages_give_the_tokens_of_the_reference_loop(seed: int) -> None:
    rng = Random(seed)
    world, requests = pipelined_world(seed, rng.choice([2, 3, 4]))
    ticks = count()
    stages = Stages(world, world.limits.num_stages, rng)
    engine = Engine(world.scheduler, stages, clock=lambda: next(ticks) * 0.01)
    got: dict[str, list[int]] = {each.request_id: [] for each in requests}
    finished: dict[str, str] = {}
    aborted = set()

    def step() -> None:
        for output in engine.step():
            got[output.request_id] += output.tokens
            if output.finish:
                finished[output.request_id] = output.finish
        world.check()

    for index, item in enumerate(requests):
        engine.add(item)
        for _ in range(rng.randint(0, 3)):
            step()
        if rng.random() < 0.1:
            victim = rng.choice(requests[: index + 1]).request_id
            if victim not in finished:
                engine.abort(victim)
                aborted.add(victim)
    for _ in range(20_000):
        if not engine.has_work:
            break
        step()
    assert not engine.has_work
    assert world.pool.num_used == 0
    for item in requests:
        want = plain_loop(item, world.limits.max_model_len, layout=world.limits.layout)
        if item.request_id in aborted:
            assert got[item.request_id] == want[: len(got[item.request_id])]
        else:
            assert got[item.request_id] == want, item.request_id


class TimedStages:
    """Stages with a clock: a stage starts a plan when it is free and the plan has arrived."""

    def __init__(self, world: World, num_stages: int) -> None:
        self.runner = FakeRunner(world.limits.num_blocks, world.limits.layout)
        self.free_at = [0] * num_stages
        self.busy = [0] * num_stages
        self.now = 0
        self.num_rows: list[int] = []

    def submit(self, plan: StepPlan) -> TimedStep:
        self.num_rows.append(len(plan.rows))
        arrives = self.now
        for stage, free_at in enumerate(self.free_at):
            self.free_at[stage] = arrives = max(free_at, arrives) + 1
            self.busy[stage] += 1
        self.now = self.free_at[0]  # the engine's process computes the first stage
        return TimedStep(self, self.runner.run(plan), arrives)


class TimedStep:
    def __init__(self, stages: TimedStages, result: StepResult, at: int) -> None:
        self._stages = stages
        self._result = result
        self._at = at

    def wait(self) -> StepResult:
        self._stages.now = max(self._stages.now, self._at)
        return self._result


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("num_requests", [4, 5, 8, 13])
def test_no_stage_idles_while_every_plan_can_have_a_request(
    num_stages: int, num_requests: int
) -> None:
    world = World(
        limits(max_num_seqs=16, num_blocks=400, max_num_batched_tokens=64, num_stages=num_stages)
    )
    stages = TimedStages(world, num_stages)
    engine = Engine(world.scheduler, stages, clock=lambda: float(stages.now))
    for index in range(num_requests):
        engine.add(request(f"r{index}", [index] * 4, max_tokens=40, ignore_eos=True))
    while engine.has_work:
        engine.step()
    # Filling and draining the pipeline costs num_stages - 1 steps each.
    assert stages.now <= max(stages.busy) + 2 * num_stages
    assert max(stages.num_rows) == -(-num_requests // num_stages)


def test_chunks_of_one_prompt_follow_each_other_without_waiting() -> None:
    world = World(limits(num_blocks=64, max_num_batched_tokens=8, num_stages=3))
    world.add(request("long", list(range(22)), max_tokens=2))
    starts = [world.plan().rows[0].start for _ in range(3)]
    assert starts == [0, 8, 16]
    assert world.plan().rows == [], "its token is on the last stage"


def test_a_request_in_flight_is_not_planned_and_the_others_are() -> None:
    world = World(limits(max_num_seqs=4, num_blocks=64, num_stages=2))
    for name in "abc":
        world.add(request(name, [1, 2], max_tokens=4))
    plans = [world.plan(), world.plan()]
    assert [[row.request_id for row in plan.rows] for plan in plans] == [["a", "b"], ["c"]]
    world.commit(plans[0], world.runner.run(plans[0]))
    assert [row.request_id for row in world.plan().rows] == ["a", "b"]
