"""Pauses between tries: they grow while tries are in vain, and end when one pays."""

from __future__ import annotations

from tests.speculative.test_speculation import Counting
from windlass import SamplingParams
from windlass.core.types import Row, SlotId, SlotInit, StepPlan
from windlass.runner.runner import CompletedStep
from windlass.speculative.costs import StepCosts
from windlass.speculative.governor import Governor
from windlass.speculative.ngram import NgramProposer
from windlass.speculative.pause import Lengths, Pause
from windlass.speculative.speculation import Speculation

LENGTHS = Lengths(patience=2, first=4, longest=10)


def tries(pause: Pause, steps: range) -> list[int]:
    """The steps with one, all of them in vain."""
    found = []
    for step in steps:
        if pause.is_over(step):
            found.append(step)
            pause.in_vain(step, LENGTHS)
    return found


def test_patience_comes_first_and_each_pause_is_twice_as_long_as_the_last() -> None:
    assert tries(Pause(), range(50)) == [0, 1, 5, 13, 23, 33, 43]


def test_when_a_try_paid_all_is_as_at_first() -> None:
    pause = Pause()
    tries(pause, range(30))
    pause.begin_anew()
    assert tries(pause, range(30, 50)) == [30, 31, 35, 43]


def test_one_that_is_ended_goes_on_as_long_as_it_was() -> None:
    pause = Pause()
    assert tries(pause, range(10)) == [0, 1, 5]
    for _ in range(3):
        pause.end(10)
    assert tries(pause, range(10, 30)) == [10, 18, 28]
    pause.end(40)
    assert tries(pause, range(40, 60)) == [40, 50], "it was over"


def test_within_a_pause_steps_come_back_as_they_are_and_one_of_sixteen_is_timed() -> None:
    dear = Governor(StepCosts({1: 1.0, 2: 9.0}), 100)
    timed: list[int] = []
    dear.took = lambda *_: timed.append(runner._number)
    num_rows = 9
    slots = [SlotId(slot) for slot in range(num_rows)]
    tokens = {slot: [1, 2] for slot in slots}
    runner = Speculation(Counting(), NgramProposer(1, 2, 4), dear, lambda: tokens)
    new = [SlotInit(str(s), s, [1, 2], 2, SamplingParams(), frozenset(), 0) for s in slots]
    rows = [Row(str(slot), slot, 1, 1, (2,), (), True) for slot in slots]
    untouched = 0
    for step in range(512):
        pending = runner.submit(StepPlan(rows, [] if step else new))
        untouched += isinstance(pending, CompletedStep)
        for slot, found in zip(slots, pending.wait().rows, strict=True):
            tokens[slot] += found.tokens
    assert untouched > 0.8 * 512
    assert 32 <= len(timed) <= 64
