"""Connects the governor to the scheduler: options of plans, drafts to verify, what results show.

Everything that it learns of the runner's side is in the results: drafts, the seconds that drafting
took, the backlog of a draft model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from windlass.core.request import Request
from windlass.core.speculation.facts import ProposerTraits, SpeculationFacts
from windlass.core.speculation.governor import Governor, StepTime
from windlass.core.speculation.prediction import PREDICTED
from windlass.core.step import Step
from windlass.core.types import NO_OPTIONS, Draft, SlotId, StepOptions, StepPlan, StepResult

_VERIFY = StepOptions(next_plan_waits=True)


class NoDrafts:
    """Asks for no drafts. Drafts that results carry nevertheless are verified whole."""

    def admit(self, slot: SlotId) -> None:
        pass

    release = admit

    def trim(self, running: Sequence[Request], budget: int) -> None:
        pass

    def withdraw(self, request: Request) -> None:
        pass

    def cap(self, max_draft_tokens: int | None) -> None:
        pass

    def options(self, step: Step, num_pending_admissions: int) -> StepOptions:
        del num_pending_admissions
        return _VERIFY if step.verifies else NO_OPTIONS

    def observe(self, step: Step, *, plan: StepPlan, result: StepResult, now: float) -> None:
        pass


class DraftPlanner:
    """Owns the governor, and the drafts of the last results until the next plan."""

    def __init__(
        self,
        governor: Governor,
        proposer: ProposerTraits,
        check_costs: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`check_costs` is called with the governor's disagreement when a request has ended."""
        self._governor = governor
        self._proposer = proposer
        self._check_costs = check_costs
        # Slots that the governor does not have: of many requests, most end before any drafting.
        self._unseen: set[SlotId] = set()
        self._unreported: set[SlotId] = set()  # slots whose backlog no result has carried
        self._offered: list[tuple[Request, int, Draft]] = []  # with the request's generation
        self._is_prelaunched = False  # whether a step that verifies the offered drafts runs
        self._found = True  # whether any of the last drafts were worth verifying
        self._last_commit = 0.0

    def admit(self, slot: SlotId) -> None:
        self._unseen.add(slot)

    def release(self, slot: SlotId) -> None:
        if slot in self._unseen:
            self._unseen.remove(slot)
        else:
            self._governor.forget(slot)
            self._unreported.discard(slot)

    def cap(self, max_draft_tokens: int | None) -> None:
        """Make at most so many draft tokens per request and step; None: as the engine was built."""
        self._governor.cap(max_draft_tokens)

    # ---- plan --------------------------------------------------------------------------------

    def trim(self, running: Sequence[Request], budget: int) -> None:
        """Cut the drafts that requests hold to the tokens that the next step should verify."""
        if not self._offered:
            return
        live: list[tuple[Request, SlotId, Draft]] = []
        for request, generation, draft in self._offered:
            if request.generation == generation and request.slot is not None:
                live.append((request, request.slot, draft))
        self._offered = []
        if not live:
            return
        num_left = sum(each.num_left for each in running if each.num_left > 1)
        counts = self._governor.choose(
            [slot for _, slot, _ in live],
            [draft for _, _, draft in live],
            min(num_left, budget),
            self._is_prelaunched,
        )
        self._found = any(counts)
        for (request, _, _), count in zip(live, counts, strict=True):
            request.drafts = request.drafts[:count]

    def withdraw(self, request: Request) -> None:
        """Forget the last draft for a request, which verifies other tokens instead."""
        self._offered = [each for each in self._offered if each[0] is not request]

    def options(self, step: Step, num_pending_admissions: int) -> StepOptions:
        """Decide whether the runner makes drafts after this step, and for which requests."""
        governor, num_rows = self._governor, len(step.members)
        if step.plan.freed:
            self._check_costs(governor.disagreement)
        # Draft tokens are verified in the next step, which may be much larger.
        allowed = governor.allows(num_rows + num_pending_admissions)
        if self._unseen and (allowed or step.verifies):
            self._admit_unseen()
        is_idle = not allowed or governor.pass_idle_step(num_rows)
        length = 0 if is_idle else min(self._draft_length(step), step.max_drafts)
        report = allowed and bool(self._unreported)
        if not length and not report:
            return _VERIFY if step.verifies else NO_OPTIONS
        # A free proposer often finds nothing: then the next step need not wait for it.
        drafts_likely = length > 0 and (self._found or not self._proposer.free)
        return StepOptions(
            draft_length=length,
            no_draft=governor.excluded if length else (),
            report_backlog=report,
            next_plan_waits=step.verifies or drafts_likely,
        )

    def _admit_unseen(self) -> None:
        for slot in self._unseen:
            self._governor.admit(slot)
        if self._proposer.computes:
            self._unreported |= self._unseen
        self._unseen.clear()

    def _draft_length(self, step: Step) -> int:
        requests = [request for request, _ in step.members]
        slots = [row.slot for row in step.plan.rows]

        def backlog(_slots: Sequence[SlotId]) -> list[int]:
            return [max(0, len(each.tokens) - 1 - each.draft_computed) for each in requests]

        computes = self._proposer.computes
        return self._governor.draft_length(
            slots, self._proposer.free, backlog if computes else None
        )

    # ---- commit ------------------------------------------------------------------------------

    def observe(self, step: Step, *, plan: StepPlan, result: StepResult, now: float) -> None:
        """Learn from a step's time and results, before they are applied to the requests."""
        # A step waits for the one before it.
        seconds = now - max(step.began, self._last_commit) - result.drafting_s
        self._last_commit = now
        options, num_rows = plan.options, len(plan.rows)
        if not options.draft_length and not step.verifies:
            if options.report_backlog:
                self._read_rows(step, plan, result)
            if step.num_tokens == num_rows and self._governor.allows(num_rows) and seconds > 0.0:
                self._governor.observe_step(
                    _step_time(step, plan, num_sampled=num_rows, step_s=seconds)
                )
            return
        num_sampled = self._read_rows(step, plan, result)
        self._is_prelaunched = result.prelaunched
        if result.num_caught_up:
            self._governor.observe_catch_up(
                num_rows=num_rows,
                num_tokens=result.num_caught_up,
                draft_length=options.draft_length,
                seconds=result.drafting_s,
            )
        elif seconds > 0.0 and all(row.num_tokens == 1 + row.num_drafts for row in plan.rows):
            draft_s = None if self._proposer.in_step else result.drafting_s
            time = _step_time(step, plan, num_sampled=num_sampled, step_s=seconds)
            self._governor.observe_step(replace(time, draft_s=draft_s))

    def _read_rows(self, step: Step, plan: StepPlan, result: StepResult) -> int:
        """Count accepted draft tokens, and keep drafts and backlogs; returns the sampled tokens."""
        drafts, num_sampled = plan.options.draft_length > 0, 0
        if drafts:
            self._offered = []
        for (request, generation), row, got in zip(
            step.members, plan.rows, result.rows, strict=True
        ):
            if not row.sample or request.finish is not None or request.generation != generation:
                continue
            num_sampled += len(got.tokens)
            if row.num_drafts and request.draft_kind != PREDICTED:
                self._governor.verified(
                    row.slot,
                    kind=request.draft_kind,
                    num_drafts=row.num_drafts,
                    num_accepted=len(got.tokens) - 1,
                )
            if got.backlog is not None:
                request.draft_computed = len(request.tokens) + len(got.tokens) - 1 - got.backlog
                self._unreported.discard(row.slot)
            if drafts and row.slot not in plan.options.no_draft:
                self._offered.append((request, generation, Draft(got.drafts, got.draft_kind)))
        return num_sampled


def _step_time(step: Step, plan: StepPlan, num_sampled: int, step_s: float) -> StepTime:
    return StepTime(
        num_rows=len(plan.rows),
        num_tokens=step.num_tokens,
        num_sampled=num_sampled,
        has_drafts=step.verifies,
        draft_length=plan.options.draft_length,
        step_s=step_s,
    )


def make_draft_planner(
    facts: SpeculationFacts, check_costs: Callable[[float], None]
) -> DraftPlanner:
    """Make the planner of an engine; see `DraftPlanner` for `check_costs`."""
    governor = Governor(
        costs=facts.costs.verify,
        max_positions_per_step=facts.max_positions_per_step,
        plain=facts.costs.plain,
        drafting=facts.costs.drafting,
        max_draft_tokens=facts.max_draft_tokens,
        max_drafts_per_row=facts.max_drafts_per_row,
    )
    return DraftPlanner(governor, facts.proposer, check_costs)
