"""A runner with speculation: each step verifies the last drafts, then drafts for the next step.

Wraps the real runner, so that the runner alone knows nothing of proposers. Steps without drafts go
straight to the runner, and while drafts are not profitable, steps overlap as without speculation.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from windlass.core.types import Row, RowResult, SlotId, SlotInit, StepPlan, StepResult
from windlass.runner.runner import PendingStep
from windlass.speculative.base import Proposer, SlotUpdate, slot_update
from windlass.speculative.governor import Governor, StepTime

_NEVER = sys.maxsize
_TIMED_EVERY = 16  # steps, while the governor is idle
KnownTokens = Callable[[], Mapping[SlotId, Sequence[int]]]


class Submits(Protocol):
    """A runner: computes plans, with draft tokens in their rows or without."""

    def submit(self, plan: StepPlan) -> PendingStep: ...


class Started(NamedTuple):
    """A step that was submitted to the runner."""

    plan: StepPlan
    number: int
    draft_length: int  # draft tokens to make for each row
    has_drafts: bool  # whether any row carries draft tokens
    began: float


class _PendingDrafts:
    """A pending step whose results get drafts when they arrive."""

    def __init__(
        self, owner: Speculation, step: Started, pending: PendingStep, has_drafts: bool
    ) -> None:
        self.has_drafts = has_drafts
        self._owner = owner
        self._step = step
        self._pending = pending

    def wait(self) -> StepResult:
        return self._owner.finish(self._step, self._pending.wait())


class Speculation:
    """Owns the proposer and the governor, and the kind of each slot's draft.

    The proposer gets the tokens of steps without drafts later, when it drafts again: such steps may
    have hundreds of rows, and little time for each.
    """

    def __init__(
        self,
        runner: Submits,
        proposer: Proposer,
        governor: Governor,
        known_tokens: KnownTokens,
        check_costs: Callable[[float], None] = lambda _: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`known_tokens` returns the tokens of all slots up to the step that finishes next.

        `check_costs` is called with the governor's disagreement when a request has ended.
        """
        self._runner = runner
        self._proposer = proposer
        self._governor = governor
        self._known_tokens = known_tokens
        self._check_costs = check_costs
        self._clock = clock
        self._unseen: dict[SlotId, SlotInit] = {}  # not yet passed to governor and proposer
        self._num_updated: dict[SlotId, int] = {}  # tokens that the proposer has
        self._updated = 0  # the last step that the proposer has
        self._skipped = 0  # the last step that it does not have
        self._kinds: dict[SlotId, int] = {}
        self._number = 0  # of the last step
        self._since: dict[SlotId, int] = {}  # the step in which a slot's request was admitted here
        self._changed = 0  # the last step with an admitted or freed slot
        self._found = True  # whether the last probe found drafts
        self._holders: set[SlotId] = set()  # slots with drafts that no step has verified yet
        self._last_arrival = 0, 0.0  # number of the last finished step, and its time
        # Whether the proposer computes tokens of its own, outside the runner's steps.
        self._computes = not (proposer.free or proposer.in_step)

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step and wait for it; its results carry drafts for the next step."""
        return self.submit(plan).wait()

    def submit(self, plan: StepPlan) -> PendingStep:
        """Start a step. The pending step tells whether the next may be planned before its end."""
        self._number += 1
        if plan.freed or plan.admitted:
            self._apply_changes(plan)
        # Draft tokens are verified in the next step, which may be much larger.
        allowed = self._governor.allows(len(plan.rows) + plan.num_pending_admissions)
        if self._unseen and (allowed or self._holders):
            self._admit_unseen()
        if not self._holders and not (allowed and self._is_observed(plan)):
            self._skipped = self._number
            return self._runner.submit(plan)  # its result passes unseen
        slots = [row.slot for row in plan.rows]
        has_drafts = bool(self._holders) and plan.has_drafts
        self._holders.difference_update(slots)
        length = self._next_draft_length(slots) if allowed else 0
        plan = plan._replace(options=plan.options._replace(draft_length=length))
        step = Started(
            plan=plan,
            number=self._number,
            draft_length=length,
            has_drafts=has_drafts,
            began=self._clock(),
        )
        pending = self._runner.submit(plan)
        waits = length > 0 and (self._found or not self._proposer.free)
        return _PendingDrafts(self, step, pending, has_drafts=waits or pending.has_drafts)

    def _next_draft_length(self, slots: list[SlotId]) -> int:
        backlog = self._backlog if self._computes else None
        return self._governor.draft_length(slots, self._proposer.free, backlog)

    def _backlog(self, slots: Sequence[SlotId]) -> list[int]:
        """Tokens of each slot that the proposer has to compute before it drafts."""
        known = self._known_tokens()
        return [self._proposer.backlog(slot, len(known.get(slot, ()))) for slot in slots]

    def _is_observed(self, plan: StepPlan) -> bool:
        """While the governor is idle, two steps in 16 are observed: the second is timed."""
        if self._number % _TIMED_EVERY < 2:
            return True
        return not self._governor.pass_idle_step(len(plan.rows))

    def _apply_changes(self, plan: StepPlan) -> None:
        self._changed = self._number
        for slot in plan.freed:
            if self._unseen.pop(slot, None) is None:
                self._governor.forget(slot)
                self._proposer.forget(slot)
                self._since.pop(slot, None)
                self._num_updated.pop(slot, None)
                self._holders.discard(slot)
        if plan.freed:
            self._check_costs(self._governor.disagreement)
        for new in plan.admitted:
            self._unseen[new.slot] = new

    def _admit_unseen(self) -> None:
        """Admit new slots late: of many requests at once, most end before any drafting."""
        for slot, new in self._unseen.items():
            self._governor.admit(slot)
            self._proposer.admit(new)
            self._since[slot] = self._number
            self._num_updated[slot] = len(new.tokens)
        self._unseen.clear()

    def finish(self, step: Started, result: StepResult) -> StepResult:
        """Count accepted draft tokens, and add drafts for the next step."""
        rows, results, now = step.plan.rows, result.rows, self._clock()
        before, at = self._last_arrival
        self._last_arrival = step.number, now
        seconds = now - max(step.began, at)
        # A step that waited for the previous one can only be timed if that one was observed.
        timed = before == step.number - 1
        if not step.draft_length and not step.has_drafts:
            self._skipped = max(self._skipped, step.number)
            if timed and step.plan.num_tokens == len(rows):
                time_of = _step_time(step, num_sampled=len(rows), step_s=seconds)
                self._governor.observe_step(time_of)
            return result
        sampled = [i for i, row in enumerate(rows) if row.sample]
        if self._changed > step.number:
            # The slot may belong to another request now: after an abort, or a plan that ran ahead.
            sampled = [i for i in sampled if self._since.get(rows[i].slot, _NEVER) <= step.number]
        self._count(rows, results, sampled)
        self._update_proposer(step.number, [slot_update(rows[i], results[i]) for i in sampled])
        drafting, backlog = 0.0, 0
        drafted = [i for i in sampled if self._governor.may_draft(rows[i].slot)]
        if step.draft_length and drafted:
            backlog = self._num_behind([rows[i].slot for i in drafted])
            result = StepResult(self._with_drafts(step, results, drafted))
            drafting = self._clock() - now
            if backlog:
                self._governor.observe_catch_up(
                    num_rows=len(rows),
                    num_tokens=backlog,
                    draft_length=step.draft_length,
                    seconds=drafting,
                )
        if timed and not backlog and all(row.num_tokens == 1 + row.num_drafts for row in rows):
            num_sampled = sum(len(results[i].tokens) for i in sampled)
            draft_s = None if self._proposer.in_step else drafting
            self._governor.observe_step(
                _step_time(step, num_sampled=num_sampled, step_s=seconds, draft_s=draft_s)
            )
        return result._replace(drafting_s=drafting)

    def _num_behind(self, slots: list[SlotId]) -> int:
        """Tokens that the proposer computes before it drafts, beyond those of a verification."""
        if not self._computes:
            return 0
        found = [self._proposer.backlog(slot, self._num_updated[slot]) for slot in slots]
        return sum(count for count in found if count > 1)

    def _update_proposer(self, number: int, updates: list[SlotUpdate]) -> None:
        """Pass the new tokens to the proposer, and before them the tokens of skipped steps."""
        num_updated = self._num_updated
        if self._skipped > self._updated:
            missed = []
            for slot, tokens in self._known_tokens().items():
                count = num_updated.get(slot, len(tokens))  # the slot may be unseen
                if count < len(tokens):
                    missed.append(SlotUpdate(slot, tokens[count:]))
                    num_updated[slot] = len(tokens)
            self._proposer.update(missed)
        self._updated = number
        for update in updates:
            num_updated[update.slot] += len(update.tokens)
        self._proposer.update(updates)

    def _count(self, rows: list[Row], results: list[RowResult], sampled: list[int]) -> None:
        for i in sampled:
            row = rows[i]
            if row.num_drafts:
                self._governor.verified(
                    row.slot,
                    kind=self._kinds[row.slot],
                    num_drafts=row.num_drafts,
                    num_accepted=len(results[i].tokens) - 1,
                )

    def _with_drafts(
        self, step: Started, results: list[RowResult], drafted: list[int]
    ) -> list[RowResult]:
        """The results, with drafts for some of the rows."""
        rows = step.plan.rows
        slots = [rows[i].slot for i in drafted]
        drafts = self._proposer.propose(slots, step.draft_length)
        prompt_tokens = sum(row.num_tokens for row in rows if not row.sample)
        counts = self._governor.choose(slots, drafts, prompt_tokens)
        self._found = any(counts)
        found = list(results)
        for i, draft, count in zip(drafted, drafts, counts, strict=True):
            if count or results[i].drafts:
                found[i] = results[i]._replace(drafts=draft.tokens[:count])
                self._kinds[rows[i].slot] = draft.kind
            if count:
                self._holders.add(rows[i].slot)
        return found


def _step_time(
    step: Started, *, num_sampled: int, step_s: float, draft_s: float | None = 0.0
) -> StepTime:
    return StepTime(
        num_rows=len(step.plan.rows),
        num_tokens=step.plan.num_tokens,
        num_sampled=num_sampled,
        has_drafts=step.has_drafts,
        draft_length=step.draft_length,
        step_s=step_s,
        draft_s=draft_s,
    )
