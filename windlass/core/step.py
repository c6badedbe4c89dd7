"""A step under construction: appends rows to the plan and marks their tokens as in flight."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from windlass.core.limits import SchedulerLimits
from windlass.core.request import Request
from windlass.core.types import BlockId, Row, StepPlan

# Builds a named tuple without its Python-level constructor: half the cost, 256 times a step.
make_tuple = tuple.__new__


class _PlannedRow(NamedTuple):
    """A row before it is known whether the step verifies draft tokens."""

    at: int  # index in the plan
    request: Request
    start: int
    num_known: int  # tokens
    fresh: list[BlockId]
    sample: bool
    drafts: tuple[int, ...]


class MultiTokenRow(NamedTuple):
    """A row of several tokens, or the first row after its request was admitted."""

    request: Request
    generation: int
    start: int
    num_tokens: int
    first: bool


@dataclass(slots=True)
class Step:
    """Owns a plan until it is emitted, and the rest of its token budget.

    `members` pairs each row with its request and the request's generation, which a preemption
    advances.
    """

    plan: StepPlan
    limits: SchedulerLimits
    budget: int
    began: float = 0.0  # when it was planned
    max_samples: int = 2**31
    prompt_budget: int = 2**31  # rest of the prompt tokens that the SLO controller allows
    max_running: int = 2**31
    max_drafts: int = 2**31  # per row
    total: int = 0  # the budget that it began with
    decode_budget: int = 0  # tokens that the rows before the prompts left
    max_prompt: int = 2**31  # tokens of the next prompt's chunk
    num_samples: int = 0  # rows that sample
    members: list[tuple[Request, int]] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_tokens: int = 0  # set by `close`
    multi_token_rows: list[MultiTokenRow] | None = None
    skipped: list[tuple[Request, int]] | None = None  # running requests without a row
    verifies: bool = False  # rows have draft tokens; set by `close`
    _verifications: list[_PlannedRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.total = self.budget

    @property
    def has_room(self) -> bool:
        """Whether a queued request may join."""
        return self.budget > 0 and self.prompt_budget > 0 and self.may_sample

    def room_for(self, count: int) -> int:
        """The rest of the budget for a row of `count` tokens."""
        return self.budget if count == 1 else min(self.budget, self.prompt_budget, self.max_prompt)

    @property
    def may_sample(self) -> bool:
        return self.num_samples < self.max_samples

    def _affordable_drafts(self, request: Request, count: int) -> tuple[int, ...]:
        """The draft tokens that fit the budget and the blocks at hand; none causes a preemption."""
        # A state cannot be rolled back when draft tokens are rejected.
        if count != request.num_left or self.limits.layout.has_state:
            return ()
        room = request.room - request.planned - count
        max_drafts = min(self.budget - count, room, request.max_tokens - request.num_output - 1)
        return request.drafts[: max(0, min(max_drafts, self.max_drafts))]

    def emit(self, request: Request, count: int, fresh: list[BlockId]) -> None:
        """Append a row and mark its tokens as in flight on the request.

        A row with draft tokens is built by `close`, which knows whether the step verifies any.
        """
        start = request.planned
        end = start + count
        sample = end == len(request.tokens) + request.num_pending
        drafts = self._affordable_drafts(request, count) if request.drafts else ()
        row = _PlannedRow(
            at=len(self.members) + len(self._verifications),
            request=request,
            start=start,
            num_known=count,
            fresh=fresh,
            sample=sample,
            drafts=drafts,
        )
        if drafts:
            self._verifications.append(row)
        else:
            self._add(row)
        self.budget -= count + len(drafts)
        if count > 1:
            self.prompt_budget -= count
        request.planned = end
        if start < request.num_prompt:
            request.timeline.num_chunks += 1
            self.num_prompt_tokens += min(end, request.num_prompt) - start
        if sample:
            self.num_samples += 1
            request.num_pending += 1
            request.drafts = ()

    def _add(self, planned: _PlannedRow) -> None:
        request, start, drafts = planned.request, planned.start, planned.drafts
        num_tokens = planned.num_known + len(drafts)
        assert request.slot is not None
        row = Row(
            request_id=request.request_id,
            slot=request.slot,
            start=start,
            num_tokens=num_tokens,
            tokens=(*request.tokens[start : start + planned.num_known], *drafts),
            blocks=tuple(planned.fresh),
            sample=planned.sample,
            num_drafts=len(drafts),
            adapter=request.adapter_slot,
        )
        self.plan.rows.insert(planned.at, row)
        self.members.insert(planned.at, (request, request.generation))
        if num_tokens > 1 or request.fresh:
            self._add_multi_token_row(request, start, num_tokens)

    def _add_multi_token_row(self, request: Request, start: int, num_tokens: int) -> None:
        row = MultiTokenRow(
            request=request,
            generation=request.generation,
            start=start,
            num_tokens=num_tokens,
            first=request.fresh,
        )
        if self.multi_token_rows is None:
            self.multi_token_rows = []
        self.multi_token_rows.append(row)
        request.fresh = False

    def close(self, budget: int) -> int:
        """End the step, which began with `budget` tokens; returns how many it uses."""
        if self._verifications:
            self._add_verifications(budget - self.budget)
        self.num_tokens = budget - self.budget
        return self.num_tokens

    def _add_verifications(self, num_tokens: int) -> None:
        drops = self.num_prompt_tokens and num_tokens <= self.limits.drop_drafts_below
        self.verifies = not drops
        for row in self._verifications:
            row.request.verifying = self.verifies
            if drops:
                self.budget += len(row.drafts)
            self._add(row._replace(drafts=()) if drops else row)

    def skip(self, request: Request) -> None:
        """Note a running request that gets no row in this step."""
        if self.skipped is None:
            self.skipped = []
        self.skipped.append((request, request.generation))

    def emit_decode(self, request: Request) -> bool:
        """Fast path of `emit` for one generated token in a block that the request already holds."""
        start = request.planned
        if start < request.num_prompt or request.drafts or self.num_samples >= self.max_samples:
            return False
        if start + self.limits.lookahead >= request.room:
            return False
        tokens = () if request.num_pending else (request.tokens[start],)
        adapter = request.adapter_slot
        values = (request.request_id, request.slot, start, 1, tokens, (), True, 0, adapter)
        self.plan.rows.append(make_tuple(Row, values))
        self.members.append((request, request.generation))
        self.budget -= 1
        self.num_samples += 1
        request.planned = start + 1
        request.num_pending += 1
        return True
