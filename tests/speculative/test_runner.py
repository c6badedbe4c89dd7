"""The runner with a proposer: which tokens the proposer gets, and what results carry."""

from __future__ import annotations

from collections.abc import Sequence

from tests.speculative.test_speculation import RecordingRunner
from windlass import SamplingParams
from windlass.core.types import Draft, Row, SlotId, SlotInit, StepOptions, StepPlan
from windlass.speculative.base import SlotUpdate
from windlass.speculative.ngram import NgramProposer
from windlass.speculative.runner import SpeculativeRunner

DRAFTS = StepOptions(draft_length=4, next_plan_waits=True)


def init(slot: int, tokens: list[int]) -> SlotInit:
    return SlotInit(str(slot), SlotId(slot), tokens, len(tokens), SamplingParams(), frozenset(), 0)


def rows(*slots: int) -> list[Row]:
    return [Row(str(slot), SlotId(slot), 0, 1, (5,), (), True) for slot in slots]


class Following:
    """A proposer that computes: records its slots, and drafts their number of tokens."""

    free = in_step = False

    def __init__(self) -> None:
        self.tokens: dict[SlotId, list[int]] = {}
        self.computed: dict[SlotId, int] = {}

    def admit(self, new: SlotInit) -> None:
        self.tokens[new.slot] = list(new.tokens)
        self.computed[new.slot] = 0

    def forget(self, slot: SlotId) -> None:
        self.tokens.pop(slot, None)

    def update(self, updates: Sequence[SlotUpdate]) -> None:
        for each in updates:
            self.tokens[each.slot] += each.tokens

    def backlog(self, slot: SlotId) -> int:
        return max(0, len(self.tokens[slot]) - 1 - self.computed[slot])

    def propose(self, slots: Sequence[SlotId], draft_length: int) -> list[Draft]:
        for slot in slots:
            self.computed[slot] = len(self.tokens[slot])
        return [Draft((len(self.tokens[slot]),) * draft_length, kind=2) for slot in slots]


def test_results_of_a_reassigned_slot_are_ignored() -> None:
    """Steps may overlap: an abort frees a slot whose step is still pending."""
    proposer = NgramProposer(1, 2, 4)
    runner = SpeculativeRunner(RecordingRunner(), proposer)

    def step(freed: list[SlotId], options: StepOptions = DRAFTS) -> StepPlan:
        return StepPlan(rows(0), [init(0, [5, 6])], freed, options=options)

    first = runner.submit(step([]))
    second = runner.submit(step([SlotId(0)]))
    first.wait()
    assert proposer._unread == {}
    third = runner.submit(step([SlotId(0)], StepOptions()))
    second.wait()
    assert proposer._unread == {}
    runner.submit(StepPlan([], freed=[SlotId(0)]))
    third.wait()
    assert runner._missed == runner._new == proposer._unread == {}


def test_the_proposer_gets_slots_and_skipped_tokens_when_it_drafts_again() -> None:
    proposer = NgramProposer(1, 2, 4)
    runner = SpeculativeRunner(RecordingRunner(), proposer)
    new = [init(0, [5, 6]), init(1, [8]), init(2, [3])]
    for step in range(3):  # without drafts
        runner.run(StepPlan(rows(0, 1), new if step == 0 else []))
    runner.run(StepPlan([], freed=[SlotId(2)]))
    assert proposer._unread == {}, "slots that are gone are never admitted"
    runner.run(StepPlan(rows(0), options=DRAFTS))
    assert set(proposer._slots) == {0}
    assert proposer._slots[SlotId(0)]._tokens == [5, 6, 0, 0, 0, 0]
    runner.run(StepPlan(rows(0, 1)))
    runner.run(StepPlan(rows(0, 1), options=DRAFTS))
    assert proposer._slots[SlotId(0)]._tokens == [5, 6, *[0] * 6]
    assert proposer._slots[SlotId(1)]._tokens == [8, *[0] * 5]


def test_a_step_that_failed_is_forgotten() -> None:
    proposer = NgramProposer(1, 2, 4)
    runner = SpeculativeRunner(RecordingRunner(), proposer)
    runner.submit(StepPlan(rows(0), [init(0, [5])]))
    runner.run(StepPlan(rows(1), [init(1, [6])], [SlotId(0)], options=DRAFTS))
    assert not runner._pending
    assert proposer._slots[SlotId(1)]._tokens == [6, 0]


def test_results_carry_drafts_as_the_plan_asks() -> None:
    proposer = Following()
    times = iter(range(100))
    runner = SpeculativeRunner(RecordingRunner(), proposer, clock=lambda: float(next(times)))
    new = [init(0, [1, 2]), init(1, [3])]
    options = StepOptions(draft_length=2, no_draft=(SlotId(1),), next_plan_waits=True)
    result = runner.run(StepPlan(rows(0, 1), new, options=options))
    assert [got.drafts for got in result.rows] == [(3, 3), ()]
    assert [got.draft_kind for got in result.rows] == [2, 0]
    assert [got.backlog for got in result.rows] == [0, 1], "after drafting"
    assert result.num_caught_up == 2
    assert result.drafting_s == 1.0
    result = runner.run(StepPlan(rows(0, 1)))
    assert [(got.drafts, got.backlog) for got in result.rows] == [((), None)] * 2
    result = runner.run(StepPlan(rows(0, 1), options=StepOptions(report_backlog=True)))
    assert [(got.drafts, got.backlog) for got in result.rows] == [((), 1), ((), 3)]
    assert proposer.tokens == {0: [1, 2, 0, 0, 0], 1: [3, 0, 0, 0]}


def test_the_tokens_of_a_verification_without_drafting_reach_the_proposer() -> None:
    """A lookahead proposer learns from the target's samples after each draft token."""
    proposer = Following()
    runner = SpeculativeRunner(RecordingRunner(), proposer)
    runner.run(StepPlan(rows(0), [init(0, [1])], options=DRAFTS))
    runner.run(StepPlan(rows(0), options=StepOptions(next_plan_waits=True)))
    assert proposer.tokens == {0: [1, 0, 0]}
