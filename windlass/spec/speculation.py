"""A runner that guesses: it verifies what was guessed for this step, and guesses for the next.

Stands before the real runner, so that one without speculation knows nothing of it. Steps without
guesses go to the runner's plain way, and while guesses do not pay, steps may overlap as ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from windlass.core.types import Row, RowResult, SlotId, StepPlan, StepResult
from windlass.runner.runner import Pending
from windlass.spec.base import Proposer, seen
from windlass.spec.governor import Governor


class Submits(Protocol):
    """What computes plans, with guesses in their rows or without."""

    def submit(self, plan: StepPlan) -> Pending: ...


class Started(NamedTuple):
    """A step that was given to the runner."""

    plan: StepPlan
    lives: list[int | None]  # of each row's slot: another by the time it arrives, and it is void
    wanted: int  # guesses of each row
    began: float


class _OnItsWay:
    """A step of which guesses will be made when its tokens are there."""

    def __init__(self, owner: Speculation, step: Started, pending: Pending, guesses: bool) -> None:
        self.guesses = guesses
        self._owner = owner
        self._step = step
        self._pending = pending

    def wait(self) -> StepResult:
        return self._owner.arrived(self._step, self._pending.wait())


class Speculation:
    """Owns the proposer and the governor, and remembers the kind of each slot's guesses."""

    def __init__(
        self,
        runner: Submits,
        proposer: Proposer,
        governor: Governor,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._proposer = proposer
        self._governor = governor
        self.now = clock
        self._kinds: dict[SlotId, int] = {}
        self._lives: dict[SlotId, int] = {}  # a number for each time that a slot was given away
        self._num_lives = 0
        self._found = True  # whether the last look for guesses gave any
        self._last_arrival = 0.0

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step and wait for it; its rows come back with guesses for the next."""
        return self.submit(plan).wait()

    def submit(self, plan: StepPlan) -> Pending:
        """Start a step. Whether the next may be planned before its end is told with it."""
        for slot in plan.freed:
            self._governor.forget(slot)
            self._lives.pop(slot, None)
        for admission in plan.admitted:
            self._governor.admit(admission.slot)
            self._num_lives += 1
            self._lives[admission.slot] = self._num_lives
        slots = [row.slot for row in plan.rows]
        wanted = self._governor.wanted(slots, self._proposer.free)
        self._proposer.begin(plan, wanted)
        step = Started(plan, [self._lives.get(slot) for slot in slots], wanted, self.now())
        pending = self._runner.submit(plan)
        waited_for = wanted > 0 and (self._found or not self._proposer.free)
        return _OnItsWay(self, step, pending, waited_for or pending.guesses)

    def arrived(self, step: Started, result: StepResult) -> StepResult:
        """Count what was right, and add guesses for the next step."""
        rows, now = step.plan.rows, self.now()
        seconds = now - max(step.began, self._last_arrival)
        self._last_arrival = now
        # A slot may have been given away since: by an abort, or by a plan that ran ahead.
        sampled = [
            i
            for i, (row, life) in enumerate(zip(rows, step.lives, strict=True))
            if row.sample and self._lives.get(row.slot) == life
        ]
        self._count(rows, result.rows, sampled)
        self._proposer.take_in([seen(rows[i], result.rows[i]) for i in sampled])
        drafting = 0.0
        if step.wanted and sampled:
            result = StepResult(self._with_drafts(rows, result.rows, sampled))
            drafting = self.now() - now
        if all(row.num_tokens == 1 + row.num_drafts for row in rows):
            guessed = any(row.num_drafts for row in rows)
            num_tokens, seconds = step.plan.num_tokens, seconds + drafting
            self._governor.took(num_tokens, guessed, seconds, len(rows), step.wanted)
        return result._replace(drafting_s=drafting)

    def _count(self, rows: list[Row], results: list[RowResult], sampled: list[int]) -> None:
        for i in sampled:
            row = rows[i]
            if row.num_drafts:
                kind = self._kinds[row.slot]
                accepted = len(results[i].tokens) - 1
                self._governor.verified(row.slot, kind, row.num_drafts, accepted)

    def _with_drafts(
        self, rows: list[Row], results: list[RowResult], sampled: list[int]
    ) -> list[RowResult]:
        slots = [rows[i].slot for i in sampled]
        drafts = self._proposer.propose(slots)
        others = sum(row.num_tokens for row in rows if not row.sample)
        counts = self._governor.choose(slots, drafts, others)
        self._found = any(counts)
        found = list(results)
        for i, draft, count in zip(sampled, drafts, counts, strict=True):
            if count or results[i].drafts:
                found[i] = results[i]._replace(drafts=draft.tokens[:count])
                self._kinds[rows[i].slot] = draft.kind
        return found
