"""The loop itself: overlapped equals plain, and a lack of memory costs no request its tokens."""

from __future__ import annotations

import pytest

from tests.core.world import FakeRunner, World, limits, plain_loop, request
from windlass.core.types import NewRequest, StepPlan, StepResult
from windlass.engine import Engine
from windlass.errors import OutOfMemory


class Later:
    """A step that is computed when it is waited for, as late as possible."""

    has_drafts = False

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


class TightRunner(FakeRunner):
    """Has no memory for more than `most` tokens a step."""

    most = 10_000

    def run(self, plan: StepPlan) -> StepResult:
        if plan.num_tokens > self.most:
            raise OutOfMemory(f"{plan.num_tokens} tokens")
        return super().run(plan)

    def submit(self, plan: StepPlan) -> Later:
        return Later(self.run(plan))


def run_all(
    requests: list[NewRequest], overlap: bool, most: int = 10_000
) -> tuple[dict[str, list[int]], dict[str, str | None]]:
    wide = limits(max_num_batched_tokens=256, num_blocks=200, max_model_len=300, max_num_seqs=4)
    world = World(wide)
    runner = TightRunner(wide.num_blocks, wide.block_size)
    runner.most = most
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


@pytest.mark.parametrize("most", [10_000, 100])
@pytest.mark.parametrize("overlap", [False, True])
def test_every_request_gets_its_tokens(overlap: bool, most: int) -> None:
    got, errors = run_all(REQUESTS, overlap, most)
    assert got == {item.request_id: plain_loop(item, 300) for item in REQUESTS}
    assert set(errors.values()) == {None}


@pytest.mark.parametrize("overlap", [False, True])
def test_only_what_can_never_fit_fails(overlap: bool) -> None:
    got, errors = run_all(REQUESTS, overlap, most=20)
    assert errors["r0"] is None
    assert got["r0"] == plain_loop(REQUESTS[0], 300)
    failed = [name for name, error in errors.items() if error]
    assert failed
    assert all("tokens" in errors[name] for name in failed)
    assert len(errors) == len(REQUESTS), "no request ends without an answer"
