"""Simulated requests with scripted acceptance and step costs from a table: with the governor they
take hardly longer than without speculation, and drafting resumes where it pays.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from windlass.core.speculation.costs import DraftCosts, StepCosts
from windlass.core.speculation.governor import Governor, StepTime
from windlass.core.types import Draft
from windlass.speculative.base import NO_DRAFT

# In steps of one token; a second token costs much on a CPU, and on a GPU nothing up to a point.
CPU = StepCosts({1: 1.0, 2: 1.4, 4: 2.1, 8: 3.6, 16: 6.6, 32: 12.4, 128: 48.0})
GPU = StepCosts({1: 1.0, 8: 1.08, 32: 1.3, 64: 1.6, 128: 2.4, 512: 8.0})
HEAD = DraftCosts({1: StepCosts({1: 0.2, 64: 0.4}), 4: StepCosts({1: 0.5, 64: 1.0})})
PROBE = 0.002  # cost per request where drafting is free
MAX_DRAFT_TOKENS = 4


class Scripted:
    """A request of several phases: number of tokens, share of drafts found, acceptance."""

    def __init__(self, seed: int, phases: list[tuple[int, float, float]]) -> None:
        rng = Random(seed)
        self.num_done = 0
        self.found = [rng.random() < found for count, found, _ in phases for _ in range(count)]
        self.accepted = [rng.random() < rate for count, _, rate in phases for _ in range(count)]

    @property
    def has_ended(self) -> bool:
        return self.num_done >= len(self.accepted)

    def draft(self, length: int) -> Draft:
        return Draft((0,) * length) if self.found[self.num_done] else NO_DRAFT

    def num_accepted(self, count: int) -> int:
        ahead = self.accepted[self.num_done : self.num_done + count]
        return ahead.index(False) if False in ahead else len(ahead)


@dataclass(frozen=True)
class Speed:
    times_plain: float
    num_verifications: int  # steps


def speed(
    phases: list[tuple[int, float, float]],
    concurrency: int,
    costs: StepCosts,
    drafting: DraftCosts | None = None,
    num_batches: int = 8,
    host: float = 0.0,
    rule: type[Governor] = Governor,
) -> Speed:
    """Run batches of `concurrency` requests one after another, and sum the costs.

    `host`: unmeasured extra cost per request in steps with drafts or drafting.
    """
    made = rule(costs, 1000, drafting=drafting, max_draft_tokens=MAX_DRAFT_TOKENS)
    seconds, plain, num_verifications = 0.0, 0.0, 0
    for batch in range(num_batches):
        live = {slot: Scripted(batch * concurrency + slot, phases) for slot in range(concurrency)}
        num_tokens = sum(len(request.accepted) for request in live.values())
        plain += num_tokens * costs.of(concurrency) / concurrency
        for slot in live:
            made.admit(slot)
        counts = dict.fromkeys(live, 0)
        while live:
            slots = list(live)
            num_draft_tokens = sum(counts[slot] for slot in slots)
            length = made.draft_length(slots, drafting is None)
            step_s, draft_s = costs.of(len(slots) + num_draft_tokens), 0.0
            if length:
                draft_s = (
                    PROBE * len(slots) if drafting is None else drafting.of(len(slots), length)
                )
            if length or num_draft_tokens:
                step_s += host * len(slots)
            accepted = {slot: live[slot].num_accepted(counts[slot]) for slot in slots}
            made.observe_step(
                StepTime(
                    num_rows=len(slots),
                    num_tokens=len(slots) + num_draft_tokens,
                    num_sampled=len(slots) + sum(accepted.values()),
                    has_drafts=num_draft_tokens > 0,
                    draft_length=length,
                    step_s=step_s,
                    draft_s=draft_s,
                )
            )
            seconds += step_s + draft_s
            num_verifications += num_draft_tokens > 0
            for slot, request in list(live.items()):
                if counts[slot]:
                    made.verified(slot, 0, counts[slot], accepted[slot])
                request.num_done += 1 + accepted[slot]
                if request.has_ended:
                    made.forget(slot)
                    del live[slot]
            slots = list(live)
            counts = dict.fromkeys(slots, 0)
            if length and slots:
                drafts = [live[slot].draft(length) for slot in slots]
                counts = dict(zip(slots, made.choose(slots, drafts, 0), strict=True))
    return Speed(plain / seconds, num_verifications)


@pytest.mark.parametrize("acceptance", [0.0, 0.2])
@pytest.mark.parametrize("concurrency", [1, 8, 32])
def test_rejected_drafts_cost_next_to_nothing(concurrency: int, acceptance: float) -> None:
    free, head = ([(200, found, acceptance)] for found in (0.4, 1.0))
    assert speed(free, concurrency, CPU).times_plain > 0.993
    assert speed(head, concurrency, GPU, HEAD).times_plain > 0.99


def test_accepted_drafts_reach_their_speed() -> None:
    assert speed([(200, 0.9, 0.95)], 1, CPU).times_plain > 1.4
    assert speed([(200, 1.0, 0.95)], 1, GPU, HEAD).times_plain > 2.5
    assert speed([(200, 1.0, 0.95)], 8, GPU, HEAD).times_plain > 2.0


@pytest.mark.parametrize(("concurrency", "drafting"), [(1, None), (1, HEAD), (8, HEAD)])
def test_drafting_resumes_when_acceptance_returns(
    concurrency: int, drafting: DraftCosts | None
) -> None:
    phases = [(300, 1.0, 0.02), (600, 1.0, 0.95)]
    at_best = speed(phases[1:], concurrency, GPU, drafting).times_plain
    assert at_best > 2.0
    # A third of the tokens has no acceptance; of the rest some may be missed.
    assert speed(phases, concurrency, GPU, drafting).times_plain > 1.3


def test_expensive_drafts_have_rare_trials_even_if_accepted() -> None:
    expensive = DraftCosts({1: StepCosts({1: 1.0, 64: 2.0}), 4: StepCosts({1: 4.0, 64: 8.0})})
    found = speed([(500, 1.0, 0.9)], 1, CPU, expensive)
    assert found.times_plain > 0.995
    assert 5 <= found.num_verifications <= 30


def test_never_profitable_drafts_have_a_few_trials() -> None:
    """The cost table may be wrong, and only a trial shows that."""
    expensive = DraftCosts({1: StepCosts({1: 4.0, 64: 8.0}), 4: StepCosts({1: 6.0, 64: 12.0})})
    found = speed([(500, 1.0, 1.0)], 1, CPU, expensive)
    assert found.times_plain > 0.995
    assert 1 <= found.num_verifications <= 4


@pytest.mark.parametrize("acceptance", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("host", [0.01, 0.03, 0.045])
def test_unmeasured_host_overhead_is_learned(host: float, acceptance: float) -> None:
    phases = [(100, 1.0, acceptance)]
    found = speed(phases, concurrency=32, costs=GPU, drafting=HEAD, host=host, num_batches=20)
    assert found.times_plain > 0.98
