"""Measurements at start, with runners whose steps advance a fake clock."""

from __future__ import annotations

import pytest

from tests.speculative.test_draft_runner import CountingRunner, proposer
from windlass.core.types import StepPlan
from windlass.runner.executor import CompletedStep
from windlass.speculative.measure import MeasureLimits, measure, spot_check

STEP_S, TOKEN_S = 1.0, 0.01
DRAFT_STEP_S, DRAFT_TOKEN_S = 0.25, 0.0025
LIMITS = MeasureLimits(
    max_positions=48, max_rows=1, max_row_tokens=6, num_blocks=4, block_size=16, max_model_len=64
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedRunner(CountingRunner):
    """Each step costs a fixed time, and more per token. Both models sample the same tokens."""

    def __init__(self, clock: Clock, step_s: float, token_s: float) -> None:
        super().__init__()
        self._clock = clock
        self._costs = step_s, token_s

    def submit(self, plan: StepPlan) -> CompletedStep:
        step_s, token_s = self._costs
        self._clock.now += step_s + token_s * plan.num_tokens
        return super().submit(plan)


def test_each_draft_token_costs_a_step_of_the_draft_model() -> None:
    """Although the target accepts every draft token."""
    clock = Clock()
    target = TimedRunner(clock, STEP_S, TOKEN_S)
    drafter = proposer(TimedRunner(clock, DRAFT_STEP_S, DRAFT_TOKEN_S))
    costs = measure(target, drafter, LIMITS, clock)
    assert costs.plain.of(1) == pytest.approx(STEP_S + TOKEN_S)
    assert costs.verify.of(4) == pytest.approx(STEP_S + 4 * TOKEN_S)
    assert costs.drafting is not None
    for length in range(1, 6):
        # The first draft step also computes the last accepted token and the target's own.
        want = length * (DRAFT_STEP_S + DRAFT_TOKEN_S) + DRAFT_TOKEN_S
        assert costs.drafting.of(1, length) == pytest.approx(want, rel=0.01)
    assert costs.drafting.prompt_token_s == pytest.approx(DRAFT_TOKEN_S, rel=0.05)
    check = spot_check(target, drafter, LIMITS, clock)
    assert check.disagreement(costs) == pytest.approx(1.0)


def test_drafting_is_measured_after_growing_verifications() -> None:
    clock = Clock()
    target = TimedRunner(clock, STEP_S, TOKEN_S)
    measure(target, proposer(TimedRunner(clock, DRAFT_STEP_S, DRAFT_TOKEN_S)), LIMITS, clock)
    verifications = [
        (row.start, row.num_tokens)
        for plan in target.plans
        for row in plan.rows
        if row.num_drafts == 5 and row.start
    ]
    assert verifications == [(1, 6), (7, 6), (13, 6)]
