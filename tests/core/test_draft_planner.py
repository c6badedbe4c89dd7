"""The draft planner: options of plans, drafts to verify, and what the governor learns of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest

from tests.core.test_worlds import random_world
from tests.core.world import World, limits, plain_loop, request
from windlass.core.speculation.costs import DraftCosts, StepCosts
from windlass.core.speculation.facts import ProposerTraits
from windlass.core.speculation.governor import Governor, StepTime
from windlass.core.speculation.planner import DraftPlanner
from windlass.core.types import StepPlan, StepResult

FREE = ProposerTraits(free=True, in_step=False)
COMPUTING = ProposerTraits(free=False, in_step=False)
CHEAP = StepCosts({1: 1.0, 2: 1.0})


class Recording(Governor):
    """A governor that records the steps it observes."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.observed: list[StepTime] = []
        self.caught_up: list[int] = []

    def observe_step(self, step: StepTime) -> None:
        self.observed.append(step)
        super().observe_step(step)

    def observe_catch_up(self, *, num_tokens: int, **options: float) -> None:
        self.caught_up.append(num_tokens)
        super().observe_catch_up(num_tokens=num_tokens, **options)  # type: ignore[arg-type]


def make(
    governor: Governor | None = None, proposer: ProposerTraits = FREE, **bounds: int
) -> tuple[World, Governor]:
    governor = governor or Recording(CHEAP, 100)
    options = {"drafts": DraftPlanner(governor, proposer)}
    world = World(limits(num_blocks=64, max_model_len=128, **bounds), options=options)
    return world, governor


def run(world: World, plan: StepPlan, drafts: tuple[int, ...] = (), **changes: float) -> StepResult:
    """Compute a plan; every sampled row gets the same drafts. `seconds`: until its commit."""
    found = world.runner.run(plan)
    rows = [
        got._replace(drafts=drafts if row.sample and plan.options.draft_length else ())
        for row, got in zip(plan.rows, found.rows, strict=True)
    ]
    return found._replace(rows=rows)._replace(**changes)


def test_a_plan_asks_for_drafts_and_the_next_plan_waits_for_them() -> None:
    world, _ = make()
    world.add(request("a", [1, 2], max_tokens=20, ignore_eos=True))
    plan = world.plan()
    assert plan.options.draft_length > 0
    assert plan.options.next_plan_waits
    world.commit(plan, run(world, plan, (0, 0, 0)))
    assert world.scheduler._requests["a"].drafts == (0, 0, 0), "trimmed by the next plan"
    verification = world.plan()
    assert verification.has_drafts
    assert verification.options.next_plan_waits


def test_steps_do_not_wait_for_a_free_proposer_that_finds_nothing() -> None:
    world, _ = make()
    world.add(request("a", [1, 2], max_tokens=20, ignore_eos=True))
    waits = []
    for drafts in ((), (), (0,), (0,)):
        plan = world.plan()
        waits.append(plan.options.next_plan_waits)
        world.commit(plan, run(world, plan, drafts))
    assert waits == [True, False, False, True]


def test_a_draft_that_an_overlapped_plan_is_past_is_not_verified() -> None:
    world, _ = make()
    world.add(request("a", [1, 2], max_tokens=20, ignore_eos=True))
    first = world.plan()
    world.commit(first, run(world, first))
    probe = world.plan()
    following = world.plan()
    world.commit(probe, run(world, probe, (0, 0)))
    assert not world.plan().has_drafts
    assert not following.has_drafts


def test_drafts_of_an_aborted_or_preempted_request_are_dropped() -> None:
    world, governor = make()
    for name in "ab":
        world.add(request(name, [1, 2], max_tokens=20, ignore_eos=True))
    plan = world.plan()
    world.commit(plan, run(world, plan, (0, 0, 0)))
    world.abort("a")
    world.scheduler._preempt(world.scheduler._requests["b"], world.now)
    world.add(request("c", [3, 4], max_tokens=20, ignore_eos=True))
    assert not world.plan().has_drafts
    assert len(governor._slots) == 2


@pytest.mark.parametrize(("num_waiting", "drafts"), [(0, True), (1, False)])
def test_pending_admissions_count_as_rows_of_the_next_step(num_waiting: int, drafts: bool) -> None:
    """Drafts are verified in the next step, which may be too large for them."""
    governor = Recording(CHEAP, 100, max_drafts_per_row=(0, 4, 0))
    world, _ = make(governor, max_num_batched_tokens=8)
    for i in range(1 + num_waiting):
        world.add(request(str(i), [1 + i] * 8, max_tokens=8, ignore_eos=True))
    assert bool(world.plan().options.draft_length) == drafts


def test_every_plain_step_that_may_have_drafts_is_timed() -> None:
    """Relative to the previous step's end, if that is later than the plan."""
    governor = Recording(CHEAP, 100, max_drafts_per_row=(0, 4, 0))
    governor.pass_idle_step = lambda _: True  # type: ignore[method-assign]
    world, _ = make(governor)
    world.add(request("a", [1], max_tokens=30, ignore_eos=True))
    world.step()
    world.now = 10.0
    first, second = world.plan(), world.plan()
    world.now = 12.0
    world.commit(first, run(world, first))
    world.now = 15.0
    world.commit(second, run(world, second))
    assert [round(step.step_s, 3) for step in governor.observed] == [1.99, 3.0]
    world.add(request("b", [2], max_tokens=30, ignore_eos=True))
    for _ in range(3):
        plan = world.plan()
        world.now += 1.0
        world.commit(plan, run(world, plan))
    assert len(governor.observed) == 2, "two rows are too many for drafts"


def test_drafting_and_prompts_are_not_part_of_a_step_time() -> None:
    world, governor = make()
    assert isinstance(governor, Recording)
    world.add(request("a", [1, 2, 3], max_tokens=30, ignore_eos=True))
    for drafting_s in (0.5, 0.75):
        plan = world.plan()
        world.now += 2.0
        world.commit(plan, run(world, plan, (0,), drafting_s=drafting_s))
    (step,) = governor.observed
    assert (step.num_tokens, step.has_drafts) == (2, True)
    assert (step.step_s, step.draft_s) == pytest.approx((1.25, 0.75))


def expensive_prompts() -> Recording:
    """A draft model whose prompt tokens cost as much as a plain step."""
    table = {length: StepCosts({1: 0.1, 2: 0.1}) for length in (1, 4)}
    drafting = DraftCosts(table, prompt_token_s=1.0)
    return Recording(CHEAP, 100, drafting=drafting, max_draft_tokens=4)


def test_a_long_backlog_excludes_a_request_until_the_runner_reports_a_short_one() -> None:
    """A draft model may have computed the prefix for an earlier request."""
    world, _ = make(expensive_prompts(), COMPUTING, max_num_batched_tokens=128)
    for name, length in (("long", 100), ("short", 3)):
        world.add(request(name, [len(name)] * length, max_tokens=20, ignore_eos=True))
    plan = world.plan()
    long, short = (row.slot for row in plan.rows)
    assert plan.options.draft_length > 0
    assert plan.options.report_backlog
    assert plan.options.no_draft == (long,)
    result = run(world, plan, (0,))
    rows = [got._replace(backlog=2) for got in result.rows]
    world.commit(plan, result._replace(rows=rows))
    plan = world.plan()
    assert not plan.options.no_draft
    assert not plan.options.report_backlog
    assert {row.slot for row in plan.rows} == {long, short}


def test_the_backlog_grows_with_steps_without_drafting() -> None:
    world, governor = make(expensive_prompts(), COMPUTING)
    backlogs = []

    def draft_length(
        slots: Sequence[int], _free: bool, backlog: Callable[[Sequence[int]], Sequence[int]]
    ) -> int:
        backlogs.extend(backlog(slots))
        return 0

    governor.draft_length = draft_length  # type: ignore[method-assign, assignment]
    world.add(request("a", [1, 2, 3, 4], max_tokens=20, ignore_eos=True))
    reported = []
    for backlog in (1, None, None):
        plan = world.plan()
        reported.append(plan.options.report_backlog)
        (got,) = run(world, plan).rows
        world.commit(plan, StepResult([got._replace(backlog=backlog)]))
    assert backlogs == [3, 1, 2]
    assert reported == [True, False, False]


def test_a_draft_model_that_caught_up_is_not_timed_as_drafting() -> None:
    governor = expensive_prompts()
    world, _ = make(governor, COMPUTING)
    world.add(request("a", [1, 2], max_tokens=20, ignore_eos=True))
    plan = world.plan()
    world.commit(plan, run(world, plan, (0,), drafting_s=3.0, num_caught_up=2))
    assert governor.caught_up == [2]
    assert governor.observed == []


def test_costs_are_checked_when_a_request_has_ended() -> None:
    found: list[float] = []
    planner = DraftPlanner(Recording(CHEAP, 100), FREE, found.append)
    world = World(limits(), options={"drafts": planner})
    for name in "ab":
        world.add(request(name, [1], max_tokens=1))
        world.step()
    assert found == [1.0]


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("proposer", [FREE, COMPUTING], ids=["free", "computing"])
def test_tokens_do_not_depend_on_the_governor(seed: int, proposer: ProposerTraits) -> None:
    """Random workloads and step times, with drafts of which 30 % are wrong."""
    rng = Random(seed)
    world, requests, ahead = random_world(seed)
    drafting = DraftCosts({n: StepCosts({1: 0.1, 2: 0.2}) for n in (1, 4)}, prompt_token_s=0.01)
    costs = StepCosts({1: 1.0, 2: rng.uniform(1, 2), 16: rng.uniform(2, 16)})
    governor = Governor(costs, 24, drafting=None if proposer.free else drafting, max_draft_tokens=4)
    world.scheduler._drafts = DraftPlanner(governor, proposer)
    world.runner.draft_length = 4
    world.runner.obeys_plans = True
    for item in requests:
        world.add(item)
        for _ in range(rng.randint(0, 3)):
            world.step()
            world.now += rng.random()
    world.finish_all(ahead=ahead)
    longest, layout = world.limits.max_model_len, world.limits.layout
    for item in requests:
        assert world.got[item.request_id] == plain_loop(item, longest, layout=layout)
    assert governor._slots == {}
