"""What is measured at start, with runners whose steps cost what a fake clock says."""

from __future__ import annotations

import pytest

from tests.speculative.test_second import CountsUp, proposer
from windlass.core.types import StepPlan
from windlass.runner.runner import CompletedStep
from windlass.speculative.measure import Room, measure, spot_check

STEP_S, TOKEN_S = 1.0, 0.01
DRAFT_STEP_S, DRAFT_TOKEN_S = 0.25, 0.0025
ROOM = Room(
    positions=48, rows=1, row_tokens=6, num_blocks=4, block_size=16, max_model_len=64, ahead=0
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(CountsUp):
    """Each step takes a time, and some for each token. Both models say the same."""

    def __init__(self, clock: Clock, step_s: float, token_s: float) -> None:
        super().__init__()
        self._clock = clock
        self._costs = step_s, token_s

    def submit(self, plan: StepPlan) -> CompletedStep:
        step_s, token_s = self._costs
        self._clock.now += step_s + token_s * plan.num_tokens
        return super().submit(plan)


def test_each_draft_token_costs_a_step_of_the_draft_model() -> None:
    """Though the target says at once what the draft model has drafted, in every step."""
    clock = Clock()
    target = Timed(clock, STEP_S, TOKEN_S)
    drafter = proposer(Timed(clock, DRAFT_STEP_S, DRAFT_TOKEN_S))
    costs = measure(target, drafter, ROOM, clock)
    assert costs.plain.of(1) == pytest.approx(STEP_S + TOKEN_S)
    assert costs.guessed.of(4) == pytest.approx(STEP_S + 4 * TOKEN_S)
    assert costs.drafting is not None
    for depth in range(1, 6):
        # The last accepted token and the target's own are computed with the first.
        want = depth * (DRAFT_STEP_S + DRAFT_TOKEN_S) + DRAFT_TOKEN_S
        assert costs.drafting.of(1, depth) == pytest.approx(want, rel=0.01)
    assert costs.drafting.prompt_token_s == pytest.approx(DRAFT_TOKEN_S, rel=0.05)
    check = spot_check(target, drafter, ROOM, clock)
    assert check.disagreement(costs) == pytest.approx(1.0)


def test_drafting_is_measured_after_verifications_that_grow() -> None:
    clock = Clock()
    target = Timed(clock, STEP_S, TOKEN_S)
    measure(target, proposer(Timed(clock, DRAFT_STEP_S, DRAFT_TOKEN_S)), ROOM, clock)
    longest = [
        (row.start, row.num_tokens)
        for plan in target.plans
        for row in plan.rows
        if row.num_drafts == 5 and row.start
    ]
    assert longest == [(1, 6), (7, 6), (13, 6)]
