"""A runner with a proposer: after steps whose plan says so, the proposer drafts for the next step.

Wraps the runner, which knows nothing of proposers. The scheduler decides: the plan has the draft
length, and the result returns all drafts of the proposer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter

from windlass.core.types import Row, RowResult, SlotId, SlotInit, StepPlan, StepResult
from windlass.kernels.storages import Held
from windlass.runner.executor import PendingStep
from windlass.speculative.base import Proposer, SlotUpdate, Submits, slot_update

_SLOT, _TOKENS = (
    itemgetter(Row._fields.index("slot")),
    itemgetter(RowResult._fields.index("tokens")),
)


class _PendingDrafts:
    """A pending step whose tokens, and drafts if the plan asks for them, follow when it arrives."""

    def __init__(self, owner: SpeculativeRunner, plan: StepPlan, pending: PendingStep) -> None:
        self.plan = plan
        self.freed: set[SlotId] = set()  # by later plans; these slots may have new requests
        self._owner = owner
        self._pending = pending

    def wait(self) -> StepResult:
        return self._owner.finish(self, self._pending.wait())


class SpeculativeRunner:
    """Owns the proposer, and the tokens that the proposer has not been given yet.

    The proposer gets new slots, and the tokens of steps without drafts, only when it drafts again:
    steps without drafts may have hundreds of rows, and must stay cheap.
    """

    def __init__(
        self,
        runner: Submits,
        proposer: Proposer,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._proposer = proposer
        self._clock = clock
        self._new: dict[SlotId, SlotInit] = {}  # slots that the proposer does not have
        self._missed: dict[SlotId, list[int]] = {}  # tokens that the proposer does not have
        self._pending: deque[_PendingDrafts] = deque()
        # Whether the proposer computes tokens of its own, outside the runner's steps.
        self._computes = not (proposer.free or proposer.in_step)

    def storages(self) -> Iterator[Held]:
        yield from self._runner.storages()
        yield from self._proposer.storages()

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step and wait for it; its results carry drafts if the plan asks for them."""
        return self.submit(plan).wait()

    def submit(self, plan: StepPlan) -> PendingStep:
        """Start a step."""
        if plan.freed or plan.admitted:
            self._apply_changes(plan)
        if not plan.rows:  # saves and loads of KV blocks
            return self._runner.submit(plan)
        pending = _PendingDrafts(self, plan, self._runner.submit(plan))
        self._pending.append(pending)
        return pending

    def _apply_changes(self, plan: StepPlan) -> None:
        for pending in self._pending:
            pending.freed.update(plan.freed)
        for slot in plan.freed:
            if self._new.pop(slot, None) is None:
                self._proposer.forget(slot)
            self._missed.pop(slot, None)
        for new in plan.admitted:
            self._new[new.slot] = new
            self._missed[new.slot] = []

    def finish(self, step: _PendingDrafts, result: StepResult) -> StepResult:
        """Keep the tokens of a step that arrived, or pass them to the proposer and draft."""
        while self._pending.popleft() is not step:
            pass  # an earlier step that failed
        options, rows, results = step.plan.options, step.plan.rows, result.rows
        if step.freed:
            kept = [i for i, row in enumerate(rows) if row.slot not in step.freed]
            rows, results = [rows[i] for i in kept], [results[i] for i in kept]
        if options.draft_length or options.next_plan_waits or options.report_backlog:
            return self._draft(step.plan, result, rows, results)
        # In C, since there may be hundreds of rows: extend the tokens of each slot.
        missed = map(self._missed.__getitem__, map(_SLOT, rows))
        deque(map(list.extend, missed, map(_TOKENS, results)), maxlen=0)
        return result

    def _draft(
        self, plan: StepPlan, result: StepResult, rows: list[Row], results: list[RowResult]
    ) -> StepResult:
        """Pass the tokens of these rows to the proposer, and add its drafts to the result."""
        options = plan.options
        began = self._clock()
        sampled = {
            row.slot: (row, got) for row, got in zip(rows, results, strict=True) if row.sample
        }
        self._catch_up(sampled)
        self._proposer.update([slot_update(row, got) for row, got in sampled.values()])
        found = {slot: got for slot, (_, got) in sampled.items()}
        slots, num_caught_up = [slot for slot in found if slot not in options.no_draft], 0
        if options.draft_length and slots:
            num_caught_up = sum(count for count in self._backlogs(slots) if count > 1)
            drafts = self._proposer.propose(slots, options.draft_length)
            for slot, draft in zip(slots, drafts, strict=True):
                found[slot] = found[slot]._replace(drafts=draft.tokens, draft_kind=draft.kind)
        if self._computes:
            for slot, backlog in zip(found, self._backlogs(found), strict=True):
                found[slot] = found[slot]._replace(backlog=backlog)
        pairs = zip(plan.rows, result.rows, strict=True)
        return result._replace(
            rows=[found.get(row.slot, got) for row, got in pairs],
            drafting_s=self._clock() - began,
            num_caught_up=num_caught_up,
        )

    def _backlogs(self, slots: Iterable[SlotId]) -> list[int]:
        return [self._proposer.backlog(slot) for slot in slots] if self._computes else []

    def _catch_up(self, slots: Iterable[SlotId]) -> None:
        """Pass new slots, and the tokens of steps without drafts, to the proposer."""
        updates = []
        for slot in slots:
            tokens, new = self._missed[slot], self._new.pop(slot, None)
            if new is not None:
                self._proposer.admit(new._replace(tokens=[*new.tokens, *tokens]))
            elif tokens:
                updates.append(SlotUpdate(slot, tokens))
            if tokens:
                self._missed[slot] = []
        if updates:
            self._proposer.update(updates)
