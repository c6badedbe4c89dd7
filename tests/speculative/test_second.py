"""A draft model that runs beside the target: what it recomputes after a verification."""

from __future__ import annotations

from collections.abc import Sequence

from windlass import SamplingParams
from windlass.core.types import BlockId, RowResult, SlotId, SlotInit, StepPlan, StepResult
from windlass.runner.runner import CompletedStep
from windlass.speculative.base import Seen
from windlass.speculative.draft_runner import DraftRunner, DraftRunnerProposer

SLOT = SlotId(0)
OTHER = SlotId(1)


class CountsUp:
    """A draft model that says n + 1 after token n, and keeps the plans that it computed."""

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


def proposer(runner: CountsUp) -> DraftRunnerProposer:
    blocks = {SLOT: range(4), OTHER: range(4, 8)}

    def blocks_of(slot: SlotId) -> Sequence[BlockId]:
        return [BlockId(block) for block in blocks[slot]]

    draft_runner = DraftRunner(
        runner=runner,
        blocks_of=blocks_of,
        block_size=16,
        step_tokens=64,
        longest=64,
        vocab_size=100,
        shares_pages=False,
        sampler=None,
        singly=False,
    )
    return DraftRunnerProposer(draft_runner, target_vocab=100)


def admit(made: DraftRunnerProposer, slot: SlotId, tokens: list[int]) -> None:
    wish = SamplingParams(temperature=0.0)
    made.admit(SlotInit(str(slot), slot, tokens, len(tokens), wish, frozenset(), 0))


def test_a_draft_follows_when_only_some_of_the_last_one_was_verified() -> None:
    """The target says itself what the draft model has already computed: there is a draft again."""
    runner = CountsUp()
    made = proposer(runner)
    admit(made, SLOT, [1, 2])
    admit(made, OTHER, [11, 12])
    made.begin(4)
    made.take_in([Seen(SLOT, [3]), Seen(OTHER, [13])])
    first = made.propose([SLOT, OTHER])
    assert [draft.tokens for draft in first] == [(4, 5, 6, 7), (14, 15, 16, 17)]
    # Of the first request no draft token was verified, of the second one; all samples agree.
    made.take_in([Seen(SLOT, [4]), Seen(OTHER, [14, 15])])
    runner.plans.clear()
    draft_runner = made.propose([SLOT, OTHER])
    assert [draft.tokens for draft in draft_runner] == [(5, 6, 7, 8), (16, 17, 18, 19)]
    assert len(runner.plans) == 4, "one step for each draft token"
    caught_up = [(row.start, row.num_tokens) for row in runner.plans[0].rows]
    assert caught_up == [(3, 1), (4, 1)], "the last token is computed again for its logits"


def test_the_draft_model_catches_up_on_what_was_accepted() -> None:
    runner = CountsUp()
    made = proposer(runner)
    admit(made, SLOT, [1, 2])
    made.begin(3)
    made.take_in([Seen(SLOT, [3])])
    made.propose([SLOT])
    for tokens, missing in (([4, 5, 6, 7], 2), ([8, 50], 1), ([60], 1)):
        made.take_in([Seen(SLOT, tokens)])
        runner.plans.clear()
        made.propose([SLOT])
        assert [row.num_tokens for plan in runner.plans for row in plan.rows] == [missing, 1, 1]
