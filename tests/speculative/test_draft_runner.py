"""The draft runner: which tokens it recomputes after a verification."""

from __future__ import annotations

from collections.abc import Sequence

from windlass import SamplingParams
from windlass.core.types import BlockId, RowResult, SlotId, SlotInit, StepPlan, StepResult
from windlass.runner.executor import CompletedStep
from windlass.speculative.base import SlotUpdate
from windlass.speculative.draft_runner import DraftRunner, DraftRunnerProposer

SLOT = SlotId(0)
OTHER = SlotId(1)


class CountingRunner:
    """Samples n + 1 after token n, and keeps the plans that it computed."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self._last: dict[SlotId, int] = {}

    def submit(self, plan: StepPlan) -> CompletedStep:
        self.plans.append(plan)
        results = []
        for row in plan.rows:
            self._last[row.slot] = 1 + (row.tokens[-1] if row.tokens else self._last[row.slot])
            results.append(RowResult([self._last[row.slot]] if row.sample else []))
        return CompletedStep(StepResult(results))


def proposer(runner: CountingRunner) -> DraftRunnerProposer:
    blocks = {SLOT: range(4), OTHER: range(4, 8)}

    def blocks_of(slot: SlotId) -> Sequence[BlockId]:
        return [BlockId(block) for block in blocks[slot]]

    draft_runner = DraftRunner(
        runner=runner,
        blocks_of=blocks_of,
        block_size=16,
        max_step_tokens=64,
        max_positions=64,
        vocab_size=100,
        shares_kv=False,
        prefers_decode=False,
    )
    return DraftRunnerProposer(draft_runner, target_vocab=100)


def admit(made: DraftRunnerProposer, slot: SlotId, tokens: list[int]) -> None:
    greedy = SamplingParams(temperature=0.0)
    made.admit(SlotInit(str(slot), slot, tokens, len(tokens), greedy, frozenset(), 0))


def test_a_draft_follows_a_partly_verified_one() -> None:
    """The target samples tokens that the draft model has already computed."""
    runner = CountingRunner()
    made = proposer(runner)
    admit(made, SLOT, [1, 2])
    admit(made, OTHER, [11, 12])
    made.update([SlotUpdate(SLOT, [3]), SlotUpdate(OTHER, [13])])
    first = made.propose([SLOT, OTHER], 4)
    assert [draft.tokens for draft in first] == [(4, 5, 6, 7), (14, 15, 16, 17)]
    # No draft token of the first request was verified, and one of the second; all samples agree.
    made.update([SlotUpdate(SLOT, [4]), SlotUpdate(OTHER, [14, 15])])
    runner.plans.clear()
    second = made.propose([SLOT, OTHER], 4)
    assert [draft.tokens for draft in second] == [(5, 6, 7, 8), (16, 17, 18, 19)]
    assert len(runner.plans) == 4, "one step for each draft token"
    caught_up = [(row.start, row.num_tokens) for row in runner.plans[0].rows]
    assert caught_up == [(3, 1), (4, 1)], "the last token is computed again for its logits"


def test_the_draft_model_catches_up_on_accepted_tokens() -> None:
    runner = CountingRunner()
    made = proposer(runner)
    admit(made, SLOT, [1, 2])
    made.update([SlotUpdate(SLOT, [3])])
    made.propose([SLOT], 3)
    for tokens, missing in (([4, 5, 6, 7], 2), ([8, 50], 1), ([60], 1)):
        made.update([SlotUpdate(SLOT, tokens)])
        runner.plans.clear()
        made.propose([SLOT], 3)
        assert [row.num_tokens for plan in runner.plans for row in plan.rows] == [missing, 1, 1]
