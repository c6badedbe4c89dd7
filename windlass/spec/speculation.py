"""A runner that guesses: it verifies what was guessed for this step, and guesses for the next.

Stands before the real runner, so that one without speculation knows nothing of it. Steps without
guesses go to the runner's plain way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from windlass.core.types import Row, RowResult, SlotId, StepPlan, StepResult
from windlass.runner.runner import Done
from windlass.spec.base import Proposer, Seen
from windlass.spec.governor import Governor


class Verifier(Protocol):
    """What computes plans."""

    def run(self, plan: StepPlan) -> StepResult: ...

    def verify(self, plan: StepPlan) -> StepResult: ...


class Speculation:
    """Owns the proposer and the governor, and remembers the kind of each slot's guesses."""

    def __init__(
        self,
        runner: Verifier,
        proposer: Proposer,
        governor: Governor,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._proposer = proposer
        self._governor = governor
        self._clock = clock
        self._kinds: dict[SlotId, int] = {}

    def submit(self, plan: StepPlan) -> Done:
        return Done(self.run(plan))

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step; its rows come back with guesses for the next."""
        for slot in plan.freed:
            self._proposer.forget(slot)
            self._governor.forget(slot)
        for admission in plan.admitted:
            self._proposer.admit(admission.slot, admission.tokens)
            self._governor.admit(admission.slot)
        rows = plan.rows
        guessed = any(row.num_drafts for row in rows)
        start = self._clock()
        result = self._runner.verify(plan) if guessed else self._runner.run(plan)
        if all(row.num_tokens == 1 + row.num_drafts for row in rows):
            self._governor.took(plan.num_tokens, guessed, self._clock() - start)
        if guessed:
            self._count(rows, result.rows)
        return StepResult(self._with_drafts(rows, result.rows))

    def _count(self, rows: list[Row], results: list[RowResult]) -> None:
        for row, result in zip(rows, results, strict=True):
            if row.num_drafts:
                kind = self._kinds[row.slot]
                accepted = len(result.tokens) - 1
                self._governor.verified(row.slot, kind, row.num_drafts, accepted)

    def _with_drafts(self, rows: list[Row], results: list[RowResult]) -> list[RowResult]:
        sampled = [i for i, row in enumerate(rows) if row.sample]
        slots = [rows[i].slot for i in sampled]
        seen = [Seen(rows[i].slot, results[i].tokens) for i in sampled]
        drafts = self._proposer.propose(seen)
        others = sum(row.num_tokens for row in rows if not row.sample)
        counts = self._governor.choose(slots, drafts, others)
        found = list(results)
        for i, draft, count in zip(sampled, drafts, counts, strict=True):
            if count:
                found[i] = results[i]._replace(drafts=draft.tokens[:count])
                self._kinds[rows[i].slot] = draft.kind
        return found
