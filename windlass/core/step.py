"""A step while it is being planned: rows are appended here, and requests note what is in flight."""

from __future__ import annotations

from dataclasses import dataclass, field

from windlass.core.accounting import Wide
from windlass.core.limits import SchedulerLimits
from windlass.core.request import Request
from windlass.core.types import BlockId, Row, StepPlan

# Named tuples without a detour through their Python constructor: half the cost, 256 times a step.
make_tuple = tuple.__new__


@dataclass(slots=True)
class Step:
    """Owns a plan until it is handed out, and what is left of its budget.

    `members` remembers to which life of a request a row belongs.
    """

    plan: StepPlan
    limits: SchedulerLimits
    budget: int
    members: list[tuple[Request, int]] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_tokens: int = 0  # set when the plan is handed out
    wide: list[Wide] | None = None
    left_out: list[tuple[Request, int]] | None = None  # running, without a row

    def _affordable_drafts(self, request: Request, count: int) -> tuple[int, ...]:
        """The guesses that fit in what is left; nobody is interrupted for a guess."""
        if count != request.num_left:
            return ()
        room = len(request.blocks) * self.limits.block_size - request.planned - count
        most = min(self.budget - count, room, request.max_tokens - request.num_output - 1)
        return request.drafts[: max(0, most)]

    def emit(self, request: Request, count: int, fresh: list[BlockId]) -> None:
        """Append the row, and note on the request what is now in flight."""
        start = request.planned
        end = start + count
        drafts = self._affordable_drafts(request, count) if request.drafts else ()
        sample = end == len(request.tokens) + request.num_pending
        assert request.slot is not None
        tokens = (*request.tokens[start:end], *drafts)
        num_tokens = count + len(drafts)
        values = (request.request_id, request.slot, start, num_tokens, tokens, tuple(fresh), sample)
        self.plan.rows.append(Row(*values, len(drafts), request.adapter_slot))
        self.members.append((request, request.generation))
        if num_tokens > 1 or request.fresh:
            place = (request.generation, start, num_tokens, request.fresh)
            if self.wide is None:
                self.wide = []
            self.wide.append(Wide(request, *place))
            request.fresh = False
        self.budget -= num_tokens
        request.planned = end
        if start < request.num_prompt:
            request.timeline.num_chunks += 1
            self.num_prompt_tokens += min(end, request.num_prompt) - start
        if sample:
            request.num_pending += 1
            request.verifying = bool(drafts)
            request.drafts = ()

    def close(self, whole: int) -> int:
        """No row comes any more; returns the tokens of the step, of `whole` that it might have had."""
        if self.num_prompt_tokens and whole - self.budget <= self.limits.drop_drafts_below:
            self._drop_guesses()
        self.num_tokens = whole - self.budget
        return self.num_tokens

    def _drop_guesses(self) -> None:
        rows, dropped = self.plan.rows, {}
        for i, ((request, _), row) in enumerate(zip(self.members, rows, strict=True)):
            if row.num_drafts:
                count = row.num_tokens - row.num_drafts
                rows[i] = row._replace(num_tokens=count, tokens=row.tokens[:count], num_drafts=0)
                dropped[row.request_id] = row.num_drafts
                request.verifying = False
        if dropped:
            self.budget += sum(dropped.values())
            self.wide = [_without(wide, dropped) for wide in self.wide or ()]

    def leave_out(self, request: Request) -> None:
        """It runs, but this step computes nothing of it."""
        if self.left_out is None:
            self.left_out = []
        self.left_out.append((request, request.generation))

    def emit_decode(self, request: Request) -> bool:
        """`emit` for the row that nearly all are: one generated token, in a block it holds."""
        start = request.planned
        if start < request.num_prompt or request.drafts:
            return False
        if start + self.limits.lookahead >= len(request.blocks) * self.limits.block_size:
            return False
        tokens = () if request.num_pending else (request.tokens[start],)
        adapter = request.adapter_slot
        values = (request.request_id, request.slot, start, 1, tokens, (), True, 0, adapter)
        self.plan.rows.append(make_tuple(Row, values))
        self.members.append((request, request.generation))
        self.budget -= 1
        request.planned = start + 1
        request.num_pending += 1
        return True


def _without(wide: Wide, dropped: dict[str, int]) -> Wide:
    num_dropped = dropped.get(wide.request.request_id, 0)
    return wide._replace(num_tokens=wide.num_tokens - num_dropped) if num_dropped else wide
