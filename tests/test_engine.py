"""The engine loop: overlapped equals synchronous, and running out of memory loses no tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.core.world import FakeRunner, World, limits, plain_loop, request
from windlass.core.types import NewRequest, StepPlan, StepResult
from windlass.engine import Engine
from windlass.errors import OutOfMemory


class LazyStep:
    """A launched step that is computed only in `wait`, as late as possible."""

    def __init__(self, compute: Callable[[], StepResult]) -> None:
        self._compute = compute

    def wait(self) -> StepResult:
        return self._compute()


class TightRunner(FakeRunner):
    """Runs out of memory above `max_tokens` per step. Counts launched and computed steps."""

    max_tokens = 10_000
    num_launched = 0
    num_finished = 0

    def run(self, plan: StepPlan) -> StepResult:
        self._check_memory(plan)
        return super().run(plan)

    def submit(self, plan: StepPlan) -> LazyStep:
        self._check_memory(plan)
        self.num_launched += 1
        return LazyStep(lambda: self._finish(plan))

    def _finish(self, plan: StepPlan) -> StepResult:
        self.num_finished += 1
        return super().run(plan)

    def _check_memory(self, plan: StepPlan) -> None:
        if plan.num_tokens > self.max_tokens:
            raise OutOfMemory(f"{plan.num_tokens} tokens")


def run_all(
    requests: list[NewRequest], overlap: bool, max_tokens: int = 10_000
) -> tuple[dict[str, list[int]], dict[str, str | None]]:
    step_limits = limits(
        max_num_batched_tokens=256, num_blocks=200, max_model_len=300, max_num_seqs=4
    )
    world = World(step_limits)
    runner = TightRunner(step_limits.num_blocks, step_limits.layout)
    runner.max_tokens = max_tokens
    engine = Engine(world.scheduler, runner, overlap=overlap)
    got: dict[str, list[int]] = {item.request_id: [] for item in requests}
    errors: dict[str, str | None] = {}
    for item in requests:
        engine.add(item)
    for _ in range(5000):
        if not engine.has_work:
            break
        for output in engine.step():
            got[output.request_id] += output.tokens
            if output.finish:
                errors[output.request_id] = output.error
    assert not engine.has_work
    assert engine.stats().num_used_blocks == 0
    return got, errors


REQUESTS = [
    request(f"r{i}", [(i * j) % 7 for j in range(5 + 37 * i)], max_tokens=30, ignore_eos=i % 2 == 0)
    for i in range(7)
]


@pytest.mark.parametrize("max_tokens", [10_000, 100])
@pytest.mark.parametrize("overlap", [False, True])
def test_every_request_gets_its_tokens(overlap: bool, max_tokens: int) -> None:
    got, errors = run_all(REQUESTS, overlap, max_tokens)
    assert got == {item.request_id: plain_loop(item, 300) for item in REQUESTS}
    assert set(errors.values()) == {None}


def test_the_overlapped_loop_launches_a_step_before_the_previous_one_is_computed() -> None:
    world = World(limits())
    runner = TightRunner(world.limits.num_blocks, world.limits.layout)
    engine = Engine(world.scheduler, runner, overlap=True)
    engine.add(request("r", [1, 2, 3], max_tokens=4, ignore_eos=True))
    assert engine.step() == []
    assert (runner.num_launched, runner.num_finished) == (1, 0)
    (output,) = engine.step()
    assert output.tokens
    assert (runner.num_launched, runner.num_finished) == (2, 1)


@pytest.mark.parametrize("overlap", [False, True])
def test_only_requests_that_can_never_fit_fail(overlap: bool) -> None:
    got, errors = run_all(REQUESTS, overlap, max_tokens=20)
    assert errors["r0"] is None
    assert got["r0"] == plain_loop(REQUESTS[0], 300)
    failed = [name for name, error in errors.items() if error]
    assert failed
    assert all("tokens" in errors[name] for name in failed)
    assert len(errors) == len(REQUESTS), "no request ends without an answer"
