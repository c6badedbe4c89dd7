"""A runner that guesses: it verifies what was guessed for this step, and guesses for the next.

Stands before the real runner, so that one without speculation knows nothing of it. Steps without
guesses go to the runner's plain way, and while guesses do not pay, steps may overlap as ever.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from windlass.core.types import Row, RowResult, SlotId, SlotInit, StepPlan, StepResult
from windlass.runner.runner import PendingStep
from windlass.speculative.base import Proposer, Seen, seen
from windlass.speculative.governor import Governor, StepTime

_NEVER = sys.maxsize
_TIMED = 16  # one of so many steps, while nobody guesses
Known = Callable[[], Mapping[SlotId, Sequence[int]]]


class Submits(Protocol):
    """What computes plans, with guesses in their rows or without."""

    def submit(self, plan: StepPlan) -> PendingStep: ...


class Started(NamedTuple):
    """A step that was given to the runner."""

    plan: StepPlan
    number: int
    wanted: int  # guesses of each row
    guessed: bool  # whether any row carries guesses
    began: float


class _PendingDrafts:
    """A step of which guesses will be made when its tokens are there."""

    def __init__(
        self, owner: Speculation, step: Started, pending: PendingStep, has_drafts: bool
    ) -> None:
        self.has_drafts = has_drafts
        self._owner = owner
        self._step = step
        self._pending = pending

    def wait(self) -> StepResult:
        return self._owner.arrived(self._step, self._pending.wait())


class Speculation:
    """Owns the proposer and the governor, and remembers the kind of each slot's guesses.

    Of steps without guesses the proposer is told later, when it is asked for some: then there may
    be hundreds of rows, and little time for each.
    """

    def __init__(
        self,
        runner: Submits,
        proposer: Proposer,
        governor: Governor,
        known: Known,
        check_costs: Callable[[float], None] = lambda _: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`known` gives the tokens of all slots up to the step whose results come next.

        `check_costs` is called with the governor's disagreement when a request has ended.
        """
        self._runner = runner
        self._proposer = proposer
        self._governor = governor
        self._known = known
        self._check_costs = check_costs
        self.now = clock
        self._unmet: dict[SlotId, SlotInit] = {}  # of whom nobody was told yet
        self._num_told: dict[SlotId, int] = {}  # tokens that the proposer knows
        self._told = 0  # the last step of which it was told
        self._skipped = 0  # the last of which it was not
        self._kinds: dict[SlotId, int] = {}
        self._number = 0  # of the last step
        self._wanted = 0  # guesses of each row, as the proposer knows it
        self._since: dict[SlotId, int] = {}  # the step since which a slot's request is known
        self._changed = 0  # the last step with which one came or went
        self._found = True  # whether the last look for guesses gave any
        self._holders: set[SlotId] = set()  # slots with guesses that no step has verified yet
        self._last_arrival = 0, 0.0  # the number of a step, and when it came back
        # Whether it has tokens of its own to compute, outside of the runner's steps.
        self._computes = not (proposer.free or proposer.in_step)
        self._begin(0)

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step and wait for it; its rows come back with guesses for the next."""
        return self.submit(plan).wait()

    def submit(self, plan: StepPlan) -> PendingStep:
        """Start a step. Whether the next may be planned before its end is told with it."""
        self._number += 1
        if plan.freed or plan.admitted:
            self._note_changes(plan)
        # Guesses are verified in the next step, which may be much larger.
        allowed = self._governor.allows(len(plan.rows) + plan.num_pending_admissions)
        if self._unmet and (allowed or self._holders):
            self._meet()
        if not self._holders and not (allowed and self._is_looked_at(plan)):
            if self._wanted:
                self._begin(0)
            self._skipped = self._number
            return self._runner.submit(plan)  # nobody waits for it on its way back
        slots = [row.slot for row in plan.rows]
        guessed = bool(self._holders) and plan.has_drafts
        self._holders.difference_update(slots)
        wanted = self._wanted_for(slots) if allowed else 0
        self._begin(wanted)
        step = Started(plan, self._number, wanted, guessed, self.now())
        pending = self._runner.submit(plan)
        waited_for = wanted > 0 and (self._found or not self._proposer.free)
        return _PendingDrafts(self, step, pending, waited_for or pending.has_drafts)

    def _wanted_for(self, slots: list[SlotId]) -> int:
        backlog = self._backlog if self._computes else None
        return self._governor.wanted(slots, self._proposer.free, backlog)

    def _backlog(self, slots: Sequence[SlotId]) -> list[int]:
        """Tokens that the proposer would have to compute before it drafts."""
        known = self._known()
        return [self._proposer.backlog(slot, len(known.get(slot, ()))) for slot in slots]

    def _is_looked_at(self, plan: StepPlan) -> bool:
        """Within a pause only two steps now and then are: the second is timed."""
        return self._number % _TIMED < 2 or not self._governor.rests(len(plan.rows))

    def _begin(self, wanted: int) -> None:
        self._wanted = wanted
        self._proposer.begin(wanted)

    def _note_changes(self, plan: StepPlan) -> None:
        self._changed = self._number
        for slot in plan.freed:
            if self._unmet.pop(slot, None) is None:
                self._governor.forget(slot)
                self._proposer.forget(slot)
                self._since.pop(slot, None)
                self._num_told.pop(slot, None)
                self._holders.discard(slot)
        if plan.freed:
            self._check_costs(self._governor.disagreement)
        for admission in plan.admitted:
            self._unmet[admission.slot] = admission

    def _meet(self) -> None:
        """Get to know those who came: of many at once most are gone before anybody guesses."""
        for slot, admission in self._unmet.items():
            self._governor.admit(slot)
            self._proposer.admit(admission)
            self._since[slot] = self._number
            self._num_told[slot] = len(admission.tokens)
        self._unmet.clear()

    def arrived(self, step: Started, result: StepResult) -> StepResult:
        """Count what was accepted, and add drafts for the next step."""
        rows, results, now = step.plan.rows, result.rows, self.now()
        before, at = self._last_arrival
        self._last_arrival = step.number, now
        seconds = now - max(step.began, at)
        # Of one that waited for another it is not known how long, if nobody saw that one come back.
        timed = before == step.number - 1
        if not step.wanted and not step.guessed:
            self._skipped = max(self._skipped, step.number)
            if timed and step.plan.num_tokens == len(rows):
                self._governor.took(_step_time(step, num_sampled=len(rows), step_s=seconds))
            return result
        sampled = [i for i, row in enumerate(rows) if row.sample]
        if self._changed > step.number:
            # A slot may have been given away since: by an abort, or by a plan that ran ahead.
            sampled = [i for i in sampled if self._since.get(rows[i].slot, _NEVER) <= step.number]
        self._count(rows, results, sampled)
        self._tell(step.number, [seen(rows[i], results[i]) for i in sampled])
        drafting, backlog = 0.0, 0
        drafted = [i for i in sampled if self._governor.may_draft(rows[i].slot)]
        if step.wanted and drafted:
            backlog = self._num_behind([rows[i].slot for i in drafted])
            result = StepResult(self._with_drafts(rows, results, drafted))
            drafting = self.now() - now
            if backlog:
                self._governor.caught_up(len(rows), backlog, step.wanted, drafting)
        if timed and not backlog and all(row.num_tokens == 1 + row.num_drafts for row in rows):
            num_sampled = sum(len(results[i].tokens) for i in sampled)
            draft_s = None if self._proposer.in_step else drafting
            self._governor.took(_step_time(step, num_sampled, seconds, draft_s))
        return result._replace(drafting_s=drafting)

    def _num_behind(self, slots: list[SlotId]) -> int:
        """Tokens that the proposer computes before it drafts, beyond those of a verification."""
        if not self._computes:
            return 0
        found = [self._proposer.backlog(slot, self._num_told[slot]) for slot in slots]
        return sum(count for count in found if count > 1)

    def _tell(self, number: int, news: list[Seen]) -> None:
        """Let the proposer know what came now, and before that what it missed."""
        told = self._num_told
        if self._skipped > self._told:
            missed = []
            for slot, tokens in self._known().items():
                num_told = told.get(slot, len(tokens))  # it may be unmet
                if num_told < len(tokens):
                    missed.append(Seen(slot, tokens[num_told:]))
                    told[slot] = len(tokens)
            self._proposer.take_in(missed)
        self._told = number
        for each in news:
            told[each.slot] += len(each.tokens)
        self._proposer.take_in(news)

    def _count(self, rows: list[Row], results: list[RowResult], sampled: list[int]) -> None:
        for i in sampled:
            row = rows[i]
            if row.num_drafts:
                kind = self._kinds[row.slot]
                accepted = len(results[i].tokens) - 1
                self._governor.verified(row.slot, kind, row.num_drafts, accepted)

    def _with_drafts(
        self, rows: list[Row], results: list[RowResult], drafted: list[int]
    ) -> list[RowResult]:
        """The results, with drafts for some of the rows."""
        slots = [rows[i].slot for i in drafted]
        drafts = self._proposer.propose(slots)
        others = sum(row.num_tokens for row in rows if not row.sample)
        counts = self._governor.choose(slots, drafts, others)
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
    step: Started, num_sampled: int, step_s: float, draft_s: float | None = 0.0
) -> StepTime:
    return StepTime(
        num_rows=len(step.plan.rows),
        num_tokens=step.plan.num_tokens,
        num_sampled=num_sampled,
        has_drafts=step.guessed,
        depth=step.wanted,
        step_s=step_s,
        draft_s=draft_s,
    )
