"""Back-off: waits double while attempts fail, and a success resets them."""

from __future__ import annotations

from tests.speculative.test_speculation import RecordingRunner
from windlass import SamplingParams
from windlass.core.types import Row, SlotId, SlotInit, StepPlan
from windlass.runner.runner import CompletedStep
from windlass.speculative.backoff import Backoff, BackoffSchedule
from windlass.speculative.costs import StepCosts
from windlass.speculative.governor import Governor
from windlass.speculative.ngram import NgramProposer
from windlass.speculative.speculation import Speculation

SCHEDULE = BackoffSchedule(patience=2, first=4, max_wait=10)


def attempts(backoff: Backoff, steps: range) -> list[int]:
    """The steps with an attempt; all attempts fail."""
    found = []
    for step in steps:
        if backoff.is_due(step):
            found.append(step)
            backoff.failed(step, SCHEDULE)
    return found


def test_waits_start_after_patience_and_double() -> None:
    assert attempts(Backoff(), range(50)) == [0, 1, 5, 13, 23, 33, 43]


def test_reset_restarts_the_schedule() -> None:
    backoff = Backoff()
    attempts(backoff, range(30))
    backoff.reset()
    assert attempts(backoff, range(30, 50)) == [30, 31, 35, 43]


def test_a_failure_after_an_ended_wait_repeats_its_length() -> None:
    backoff = Backoff()
    assert attempts(backoff, range(10)) == [0, 1, 5]
    for _ in range(3):
        backoff.end_wait(10)
    assert attempts(backoff, range(10, 30)) == [10, 18, 28]
    backoff.end_wait(40)
    assert attempts(backoff, range(40, 60)) == [40, 50], "the wait was over already"


def test_idle_steps_pass_through_and_one_in_sixteen_is_timed() -> None:
    expensive = Governor(StepCosts({1: 1.0, 2: 9.0}), 100)
    timed: list[int] = []
    expensive.observe_step = lambda *_: timed.append(runner._number)
    num_rows = 9
    slots = [SlotId(slot) for slot in range(num_rows)]
    tokens = {slot: [1, 2] for slot in slots}
    runner = Speculation(RecordingRunner(), NgramProposer(1, 2, 4), expensive, lambda: tokens)
    new = [SlotInit(str(s), s, [1, 2], 2, SamplingParams(), frozenset(), 0) for s in slots]
    rows = [Row(str(slot), slot, 1, 1, (2,), (), True) for slot in slots]
    num_passed = 0
    for step in range(512):
        pending = runner.submit(StepPlan(rows, [] if step else new))
        num_passed += isinstance(pending, CompletedStep)
        for slot, found in zip(slots, pending.wait().rows, strict=True):
            tokens[slot] += found.tokens
    assert num_passed > 0.8 * 512
    assert 32 <= len(timed) <= 64
