"""A runner that guesses: it verifies what was guessed for this step, and guesses for the next.

Stands before the real runner, so that one without speculation knows nothing of it. Steps without
guesses go to the runner's plain way, and while guesses do not pay, steps may overlap as ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from windlass.core.types import Row, RowResult, SlotId, StepPlan, StepResult
from windlass.runner.runner import Pending
from windlass.spec.base import Proposer, Seen
from windlass.spec.governor import Governor


class Submits(Protocol):
    """What computes plans, with guesses in their rows or without."""

    def submit(self, plan: StepPlan) -> Pending: ...


class _OnItsWay:
    """A step of which guesses will be made when its tokens are there."""

    def __init__(
        self, owner: Speculation, plan: StepPlan, pending: Pending, wanted: bool, guesses: bool
    ) -> None:
        self.guesses = guesses
        self._owner = owner
        self._plan = plan
        self._pending = pending
        self._wanted = wanted
        self._began = owner.now()

    def wait(self) -> StepResult:
        result = self._pending.wait()
        return self._owner.arrived(self._plan, result, self._wanted, self._began)


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
        self._found = True  # whether the last look for guesses gave any
        self._last_arrival = 0.0

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step and wait for it; its rows come back with guesses for the next."""
        return self.submit(plan).wait()

    def submit(self, plan: StepPlan) -> Pending:
        """Start a step. Whether the next may be planned before its end is told with it."""
        for slot in plan.freed:
            self._governor.forget(slot)
        for admission in plan.admitted:
            self._governor.admit(admission.slot)
        wanted = self._governor.wanted(len(plan.rows), self._proposer.free)
        self._proposer.begin(plan, wanted)
        pending = self._runner.submit(plan)
        waited_for = wanted and (self._found or not self._proposer.free)
        return _OnItsWay(self, plan, pending, wanted, waited_for)

    def arrived(self, plan: StepPlan, result: StepResult, wanted: bool, began: float) -> StepResult:
        """Count what was right, and add guesses for the next step."""
        rows, now = plan.rows, self.now()
        seconds = now - max(began, self._last_arrival)
        self._last_arrival = now
        guessed = any(row.num_drafts for row in rows)
        if guessed:
            self._count(rows, result.rows)
        sampled = [i for i, row in enumerate(rows) if row.sample]
        self._proposer.take_in(
            [Seen(rows[i].slot, result.rows[i].tokens, result.rows[i].drafts) for i in sampled]
        )
        drafting = 0.0
        if wanted and sampled:
            result = StepResult(self._with_drafts(rows, result.rows, sampled))
            drafting = self.now() - now
        if all(row.num_tokens == 1 + row.num_drafts for row in rows):
            self._governor.took(plan.num_tokens, guessed or wanted, seconds + drafting)
        return result._replace(drafting_s=drafting)

    def _count(self, rows: list[Row], results: list[RowResult]) -> None:
        for row, result in zip(rows, results, strict=True):
            if row.num_drafts:
                kind = self._kinds[row.slot]
                accepted = len(result.tokens) - 1
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
