"""Attributes step time to requests, and records what blocks queued ones.

Callers pass the time in. A step costs a few additions, whatever its number of rows: a running sum
holds the seconds per token, and a request takes the difference between its first and last step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import islice
from statistics import median_low
from typing import TYPE_CHECKING

from windlass.core.deadlines import Rates
from windlass.core.trace import (
    BATCH,
    BLOCKERS,
    BLOCKS,
    MAX_CHUNKS,
    NEXT_STEP,
    PREFIX,
    SAMPLE,
    SEQUENCES,
    TENANTS,
    TOKENS,
    Chunk,
    RequestTrace,
)
from windlass.core.types import Account, Row

if TYPE_CHECKING:
    from windlass.core.request import Request
    from windlass.core.step import Step
    from windlass.core.tenant_account import TenantAccount

_MAX_TRACES = 4096  # max finished traces to keep until a caller takes them
_RING = 4096  # steps whose batch size is kept
# Weight of the last step in the recent speed: the last ten steps decide, so one slow step does not.
_RECENT = 0.1


def blocker_of(request: Request, openings: int, num_slots: int, count: int) -> int:
    """The blocker of the queue's head. Requests that were passed over have their own blockers."""
    if openings <= 0:
        return BATCH
    if not num_slots:
        return SEQUENCES
    if request.num_pending:
        return SAMPLE
    return BLOCKS if count < 0 else TOKENS


class StepAccounting:
    """Owns the time account: every moment is either idle or part of exactly one step."""

    def __init__(self) -> None:
        self.blocker: int | None = None  # of the queue's head since the last plan
        self.head: TenantAccount | None = None  # the tenant of that request, if there are several
        self.passed: list[tuple[Request, int]] = []  # queued requests with their own blocker
        self.traces: deque[RequestTrace] = deque(maxlen=_MAX_TRACES)
        self._started: float | None = None
        self._mark = 0.0  # time is accounted for up to here
        self._last_plan = 0.0  # when the last plan left requests in the queue
        self._blocked_s = [0.0] * len(BLOCKERS)
        self._several_s = [0.0] * len(
            BLOCKERS
        )  # the part of these seconds in which several tenants had requests
        self._rate = 0.0  # running sum of seconds per token over all steps
        self._num_steps = 0
        self._rows: deque[int] = deque(maxlen=_RING)
        self._mixed_s = 0.0  # seconds of steps that computed prompt tokens
        self._prefill_s = self._idle_s = self._saved_s = 0.0
        self._num_prefill = 0
        # Recent speed, for predictions: sums over steps with prompt tokens that decay, and the mean
        # time of steps without.
        self._recent_prefill_s = self._recent_num_prefill = 0.0
        self._plain_step_s = 0.0

    @property
    def now(self) -> float:
        """The latest time that a caller passed in."""
        return max(self._mark, self._last_plan)

    # ---- time --------------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """Start the account."""
        if self._started is None:
            self._started = self._mark = now

    def idle(self, now: float) -> None:
        """Book the time until now as idle."""
        self.start(now)
        self._idle_s += now - self._mark
        self._mark = now

    def step(self, now: float, step: Step) -> float:
        """Book a finished step; returns its seconds per token."""
        seconds = now - self._mark
        self._mark = now
        unit = seconds / step.num_tokens
        before = self._rate
        self._rate = before + unit
        self._rows.append(len(step.members))
        self._num_steps += 1
        if step.multi_token_rows or step.skipped:
            self._add_uneven_rows(step, before, unit=unit, seconds=seconds)
        if not step.num_prompt_tokens:
            self._plain_step_s += _RECENT * (seconds - self._plain_step_s)
        return unit

    def _add_uneven_rows(self, step: Step, before: float, unit: float, seconds: float) -> None:
        """Book rows whose number of tokens is not one."""
        if step.num_prompt_tokens:
            self._mixed_s += seconds
            self._prefill_s += unit * step.num_prompt_tokens
            self._num_prefill += step.num_prompt_tokens
            kept, num_prompt = 1 - _RECENT, step.num_prompt_tokens
            self._recent_prefill_s = kept * self._recent_prefill_s + unit * num_prompt
            self._recent_num_prefill = kept * self._recent_num_prefill + num_prompt
        for row in step.multi_token_rows or ():
            request, _, start, num_tokens, first = row
            if request.finish is not None or request.generation != row.generation:
                continue
            mine = request.share
            if first:
                mine.charged_from = before
                mine.decodes_from = self._num_steps - 1
            mine.seconds += (num_tokens - 1) * unit
            num_prompt = min(start + num_tokens, request.num_prompt) - start
            if num_prompt > 0:
                mine.prefill_s += num_prompt * unit
                mine.chunks = mine.chunks or []
                if len(mine.chunks) < MAX_CHUNKS:
                    chunk = Chunk(
                        start=start,
                        num_tokens=num_tokens,
                        step_tokens=step.num_tokens,
                        step_rows=len(step.members),
                        seconds=seconds,
                    )
                    mine.chunks.append(chunk)
            if mine.recompute_to and start + num_tokens >= mine.recompute_to:
                mine.recomputed_s += self._mark - mine.admitted_at
                mine.recompute_to = 0
        for request, generation in step.skipped or ():
            if request.finish is None and request.generation == generation:
                request.share.seconds -= unit

    def add_preempted_row(self, request: Request, row: Row, unit: float) -> None:
        """Book a row whose request was preempted after the plan: its tokens still count."""
        mine = request.share
        mine.seconds += row.num_tokens * unit
        num_prompt = min(row.start + row.num_tokens, request.num_prompt) - row.start
        if num_prompt > 0:
            mine.prefill_s += num_prompt * unit

    def add_wasted_row(self, request: Request, row: Row, unit: float) -> None:
        """Book a row as idle time, because its request finished after the plan."""
        num_prompt = max(0, min(row.start + row.num_tokens, request.num_prompt) - row.start)
        self._prefill_s -= num_prompt * unit
        self._idle_s += row.num_tokens * unit

    # ---- waiting -----------------------------------------------------------------------------

    def begin_plan(self, now: float) -> None:
        """Charge the time since the last plan to what blocked the queue's head."""
        if self.blocker is None:
            return
        seconds = now - self._last_plan
        self._blocked_s[self.blocker] += seconds
        if self.head is not None:
            self._several_s[self.blocker] += seconds
            self.head.head_s[self.blocker] += seconds
        for request, own in self.passed:
            request.share.block(own, seconds)
            request.share.block(self._blocker_of(request), -seconds)
        self.passed.clear()
        self.blocker = self.head = None

    def block_queue(self, blocker: int, now: float, head: TenantAccount | None = None) -> None:
        """End a plan that leaves requests in the queue: `blocker` holds back its head.

        `head` is the tenant of the head, if several tenants share the engine.
        """
        self.blocker, self.head = blocker, head
        self._last_plan = now

    def _blocker_of(self, request: Request) -> int:
        """The blocker of a queued request since the last plan, if it was not passed over."""
        assert self.blocker is not None
        return self.blocker if self.head is None or self.head is request.account else TENANTS

    def _sums(self, account: TenantAccount) -> tuple[float, ...]:
        """Seconds per blocker so far, as they count for the requests of one tenant."""
        others = [all_s - own for all_s, own in zip(self._several_s, account.head_s, strict=True)]
        if not any(others):
            return tuple(self._blocked_s)
        sums = [total - other for total, other in zip(self._blocked_s, others, strict=True)]
        sums[TENANTS] += sum(others)
        return tuple(sums)

    def num_ready(self, num_waiting: int) -> int:
        """Number of queued requests that need only the next step, or a prefix that this step computes."""
        if self.blocker == TOKENS:
            return num_waiting
        return sum(blocker == PREFIX for _, blocker in self.passed)

    def waiting(self, num_waiting: int) -> dict[str, int]:
        """The number of queued requests by what blocked them in the last plan."""
        counts: dict[str, int] = {}
        for request, blocker in self.passed:
            if request.finish is None:
                counts[BLOCKERS[blocker]] = counts.get(BLOCKERS[blocker], 0) + 1
        rest = num_waiting - sum(counts.values())
        if self.head is not None:
            num_passed = sum(request.account is self.head for request, _ in self.passed)
            own = min(rest, max(0, self.head.num_waiting - num_passed))
            counts[BLOCKERS[TENANTS]], rest = rest - own, own
        if rest:
            reason = NEXT_STEP if self.blocker is None else BLOCKERS[self.blocker]
            counts[reason] = counts.get(reason, 0) + rest
        return counts

    def pass_over(self, request: Request, blocker: int) -> None:
        """Note that requests behind this one may overtake it, since `blocker` is its own."""
        self.passed.append((request, blocker))

    def arrived(self, request: Request, num_waiting: int, num_running: int, now: float) -> None:
        self.start(now)
        mine = request.share
        mine.num_ahead, mine.num_running = num_waiting, num_running
        self._queue(request, now)

    def _queue(self, request: Request, now: float) -> None:
        mine = request.share
        mine.queued_at = now
        mine.blocked_before = self._sums(request.account)
        if (
            self.blocker is not None
        ):  # the request arrived within an interval, and only the rest of it counts
            mine.block(self._blocker_of(request), self._last_plan - now)

    def _leave_queue(self, request: Request, now: float) -> None:
        mine = request.share
        mine.blocked = self._blocked(request, now)
        if request.timeline.num_preemptions:
            mine.waited_again_s += now - mine.queued_at

    def _blocked(self, request: Request, now: float) -> tuple[float, ...]:
        """Seconds per blocker so far of a request in the queue."""
        mine = request.share
        sums = zip(mine.blocked, self._sums(request.account), mine.blocked_before, strict=True)
        found = [own + total - before for own, total, before in sums]
        if self.blocker is not None:  # since the last plan
            found[self._blocker_of(request)] += now - self._last_plan
        return tuple(found)

    def admitted(self, request: Request, start: int, now: float) -> bool:
        """Note an admission with `start` cached tokens; returns whether it is the first."""
        self._leave_queue(request, now)
        mine, timeline = request.share, request.timeline
        mine.admitted_at = now
        if mine.recompute_to:
            mine.num_recomputed += max(0, mine.recompute_to - start)
            if start >= mine.recompute_to:
                mine.recompute_to = 0
        if timeline.admitted is not None:
            return False
        timeline.admitted, timeline.num_cached = now, start
        return True

    # ---- the end of a run --------------------------------------------------------------------

    def preempted(self, request: Request, now: float) -> None:
        """Note that the request goes back to the queue."""
        self._settle(request)
        request.share.recompute_to = max(request.share.recompute_to, request.computed)
        self._queue(request, now)

    def _settle(self, request: Request) -> None:
        mine = request.share
        if mine.charged_from is not None:
            mine.seconds += self._rate - mine.charged_from
            mine.charged_from = None

    def first_token(self, request: Request) -> None:
        request.share.decodes_from = self._num_steps
        request.share.mixed_before = self._mixed_s

    def finished(self, request: Request, now: float) -> None:
        """Complete the request's trace and keep it until a caller takes it."""
        if request.slot is None:
            self._leave_queue(request, now)
        trace = self.trace(request, now)
        self._saved_s += trace.saved_s
        self.traces.append(trace)

    def trace(self, request: Request, now: float) -> RequestTrace:
        """The trace so far."""
        mine, timeline = request.share, replace(request.timeline, num_output=request.num_output)
        seconds = mine.seconds
        if mine.charged_from is not None:
            seconds += self._rate - mine.charged_from
        started = timeline.first_token is not None
        waits = request.slot is None and request.finish is None
        prompt_token_s = self._prefill_s / self._num_prefill if self._num_prefill else 0.0
        return RequestTrace(
            request_id=request.request_id,
            timeline=timeline,
            finish=request.finish,
            ended=now,
            num_ahead=mine.num_ahead,
            num_running=mine.num_running,
            blocked_s=self._blocked(request, now) if waits else mine.blocked,
            short_blocks=mine.short_blocks,
            first_miss=mine.first_miss,
            why_missed=mine.why_missed,
            chunks=list(mine.chunks or ()),
            batch=self._batch_since(mine.decodes_from) if started else None,
            mixed_steps_s=self._mixed_s - mine.mixed_before if started else 0.0,
            drafted=list(mine.drafted or ()),
            accepted=list(mine.accepted or ()),
            waited_again_s=mine.waited_again_s,
            num_recomputed=mine.num_recomputed,
            recomputed_s=mine.recomputed_s,
            prefill_s=mine.prefill_s,
            decode_s=seconds - mine.prefill_s,
            saved_s=timeline.num_cached * prompt_token_s,
            why_ended=mine.why_ended,
            loaded=dict(mine.loaded),
            tier_decision=mine.tier_decision,
        )

    def _batch_since(self, step: int) -> tuple[int, int, int] | None:
        count = min(self._num_steps - step, len(self._rows))
        rows = list(islice(self._rows, len(self._rows) - count, None))
        return (min(rows), median_low(rows), max(rows)) if rows else None

    def rates(self, steps_per_token: float) -> Rates:
        """The recent speed; `steps_per_token` is below 1 with speculation."""
        num_prefill = self._recent_num_prefill
        return Rates(
            prompt_token_s=self._recent_prefill_s / num_prefill if num_prefill else 0.0,
            output_token_s=self._plain_step_s * steps_per_token,
            num_measured=self._num_prefill,
        )

    def account(self) -> Account:
        if self._started is None:
            return Account()
        busy_s = self._mark - self._started - self._idle_s
        return Account(
            prefill_s=self._prefill_s,
            decode_s=busy_s - self._prefill_s,
            idle_s=self._idle_s,
            saved_s=self._saved_s,
        )
