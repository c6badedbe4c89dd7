"""Requests whose guesses are right by a script, in steps that cost what a table says: with the
governor they take next to no longer than without, and guessing comes back where it pays.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from windlass.speculative.base import NO_DRAFT, Draft
from windlass.speculative.costs import Drafting, StepCosts
from windlass.speculative.governor import Governor, StepTime

# Of one token; a second costs much on a CPU and nothing on a GPU, up to a number.
CPU = StepCosts({1: 1.0, 2: 1.4, 4: 2.1, 8: 3.6, 16: 6.6, 32: 12.4, 128: 48.0})
GPU = StepCosts({1: 1.0, 8: 1.08, 32: 1.3, 64: 1.6, 128: 2.4, 512: 8.0})
HEAD = Drafting({1: StepCosts({1: 0.2, 64: 0.4}), 4: StepCosts({1: 0.5, 64: 1.0})})
LOOK = 0.002  # for a request
MOST = 4


class Scripted:
    """A request of several phases: so many tokens, how often guesses are found, and are right."""

    def __init__(self, seed: int, phases: list[tuple[int, float, float]]) -> None:
        rng = Random(seed)
        self.num_done = 0
        self.found = [rng.random() < found for count, found, _ in phases for _ in range(count)]
        self.right = [rng.random() < right for count, _, right in phases for _ in range(count)]

    @property
    def has_ended(self) -> bool:
        return self.num_done >= len(self.right)

    def draft(self, depth: int) -> Draft:
        return Draft((0,) * depth) if self.found[self.num_done] else NO_DRAFT

    def num_right(self, count: int) -> int:
        ahead = self.right[self.num_done : self.num_done + count]
        return ahead.index(False) if False in ahead else len(ahead)


@dataclass(frozen=True)
class Speed:
    times_plain: float
    num_guessed: int  # steps


def speed(
    phases: list[tuple[int, float, float]],
    at_once: int,
    costs: StepCosts,
    making: Drafting | None = None,
    num_batches: int = 8,
    host: float = 0.0,
) -> Speed:
    """Run as many requests as there is room for, and those after them, and add up the costs.

    `host`: what each request costs more in steps around guesses, which nobody measured.
    """
    made = Governor(costs, 1000, drafting=making, max_draft_tokens=MOST)
    seconds, plain, num_guessed = 0.0, 0.0, 0
    for batch in range(num_batches):
        live = {slot: Scripted(batch * at_once + slot, phases) for slot in range(at_once)}
        num_tokens = sum(len(request.right) for request in live.values())
        plain += num_tokens * costs.of(at_once) / at_once
        for slot in live:
            made.admit(slot)
        counts = dict.fromkeys(live, 0)
        while live:
            slots = list(live)
            num_draft_tokens = sum(counts[slot] for slot in slots)
            wanted = made.wanted(slots, making is None)
            step_s, draft_s = costs.of(len(slots) + num_draft_tokens), 0.0
            if wanted:
                draft_s = LOOK * len(slots) if making is None else making.of(len(slots), wanted)
            if wanted or num_draft_tokens:
                step_s += host * len(slots)
            rights = {slot: live[slot].num_right(counts[slot]) for slot in slots}
            made.took(
                StepTime(
                    num_rows=len(slots),
                    num_tokens=len(slots) + num_draft_tokens,
                    num_sampled=len(slots) + sum(rights.values()),
                    has_drafts=num_draft_tokens > 0,
                    depth=wanted,
                    step_s=step_s,
                    draft_s=draft_s,
                )
            )
            seconds, num_guessed = seconds + step_s + draft_s, num_guessed + (num_draft_tokens > 0)
            for slot, request in list(live.items()):
                right = rights[slot]
                if counts[slot]:
                    made.verified(slot, 0, counts[slot], right)
                request.num_done += 1 + right
                if request.has_ended:
                    made.forget(slot)
                    del live[slot]
            slots = list(live)
            counts = dict.fromkeys(slots, 0)
            if wanted and slots:
                drafts = [live[slot].draft(wanted) for slot in slots]
                counts = dict(zip(slots, made.choose(slots, drafts, 0), strict=True))
    return Speed(plain / seconds, num_guessed)


@pytest.mark.parametrize("right", [0.0, 0.2])
@pytest.mark.parametrize("at_once", [1, 8, 32])
def test_guesses_that_fail_cost_next_to_nothing(at_once: int, right: float) -> None:
    free, head = ([(200, often, right)] for often in (0.4, 1.0))
    assert speed(free, at_once, CPU).times_plain > 0.993
    assert speed(head, at_once, GPU, HEAD).times_plain > 0.99


def test_guesses_that_are_right_are_made_all_along() -> None:
    assert speed([(200, 0.9, 0.95)], 1, CPU).times_plain > 1.4
    assert speed([(200, 1.0, 0.95)], 1, GPU, HEAD).times_plain > 2.5
    assert speed([(200, 1.0, 0.95)], 8, GPU, HEAD).times_plain > 2.0


@pytest.mark.parametrize(("at_once", "making"), [(1, None), (1, HEAD), (8, HEAD)])
def test_guessing_comes_back_when_guesses_are_right_again(
    at_once: int, making: Drafting | None
) -> None:
    turns = [(300, 1.0, 0.02), (600, 1.0, 0.95)]
    at_best = speed(turns[1:], at_once, GPU, making).times_plain
    assert at_best > 2.0
    # Of a third of its tokens none was right; of the rest it may miss some.
    assert speed(turns, at_once, GPU, making).times_plain > 1.3


def test_what_costs_more_than_it_gives_is_tried_rarely_even_if_it_is_right() -> None:
    dear = Drafting({1: StepCosts({1: 1.0, 64: 2.0}), 4: StepCosts({1: 4.0, 64: 8.0})})
    found = speed([(500, 1.0, 0.9)], 1, CPU, dear)
    assert found.times_plain > 0.995
    assert 5 <= found.num_guessed <= 30


def test_what_would_not_pay_if_it_were_always_right_is_tried_a_few_times() -> None:
    """Its costs may be wrong, and only a trial shows that."""
    dear = Drafting({1: StepCosts({1: 4.0, 64: 8.0}), 4: StepCosts({1: 6.0, 64: 12.0})})
    found = speed([(500, 1.0, 1.0)], 1, CPU, dear)
    assert found.times_plain > 0.995
    assert 1 <= found.num_guessed <= 4


@pytest.mark.parametrize("right", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("host", [0.01, 0.03, 0.045])
def test_a_host_that_has_more_to_do_than_was_measured(host: float, right: float) -> None:
    found = speed([(100, 1.0, right)], 32, GPU, HEAD, host=host, num_batches=20)
    assert found.times_plain > 0.98
