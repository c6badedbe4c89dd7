"""Keeps the engine's time: which step's it was, whose share of it, and what waiting ones wait for.

Told the time by its callers. A step costs a few additions, whatever its number of rows: what all
rows share is summed up once, and a request takes the difference between its start and its end.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import islice
from statistics import median_low
from typing import TYPE_CHECKING, NamedTuple

from windlass.core.trace import (
    ADAPTER,
    BATCH,
    BLOCKERS,
    BLOCKS,
    MAX_CHUNKS,
    PREFIX,
    SAMPLE,
    SEQUENCES,
    TOKENS,
    Chunk,
    RequestTrace,
)
from windlass.core.types import Account, Row

if TYPE_CHECKING:
    from windlass.core.request import Request
    from windlass.core.step import Step

_MAX_TRACES = 4096  # kept for who does not ask for them
_RING = 4096  # steps whose number of rows is remembered


class Wide(NamedTuple):
    """A row of more than one token, or the first since its request got a slot."""

    request: Request
    generation: int
    start: int
    num_tokens: int
    first: bool


def lacks(request: Request | None, openings: int, num_slots: int, count: int) -> int:
    """What the first in a queue lacks; those set aside have blockers of their own."""
    if request is None:
        return ADAPTER
    if openings <= 0:
        return BATCH
    if not num_slots:
        return SEQUENCES
    if request.num_pending:
        return SAMPLE
    return BLOCKS if count < 0 else TOKENS


class StepAccounting:
    """Owns the account of time. Every moment is idle or belongs to a step, and none to both."""

    def __init__(self) -> None:
        self.blocker: int | None = None  # of the first in the queue, since the last plan
        self.passed: list[tuple[Request, int]] = []  # waiting ones with a blocker of their own
        self.traces: deque[RequestTrace] = deque(maxlen=_MAX_TRACES)
        self._started: float | None = None
        self._mark = 0.0  # the time is accounted for up to here
        self._looked_at = 0.0  # when the last plan was made with someone waiting
        self._blocked_s = [0.0] * len(BLOCKERS)
        self._rate = 0.0  # seconds of a token that was in every step
        self._num_steps = 0
        self._rows: deque[int] = deque(maxlen=_RING)
        self._mixed_s = 0.0  # of steps with prompt tokens
        self._prefill_s = self._idle_s = self._saved_s = 0.0
        self._num_prefill = 0

    @property
    def now(self) -> float:
        """The latest time that it was told."""
        return max(self._mark, self._looked_at)

    # ---- the time ----------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """From here on the time counts."""
        if self._started is None:
            self._started = self._mark = now

    def rest(self, now: float) -> None:
        """Nothing was running until now."""
        self.start(now)
        self._idle_s += now - self._mark
        self._mark = now

    def step(self, now: float, step: Step) -> float:
        """A step has ended; returns the seconds that each of its tokens took."""
        seconds = now - self._mark
        self._mark = now
        unit = seconds / step.num_tokens
        before = self._rate
        self._rate = before + unit
        self._rows.append(len(step.members))
        self._num_steps += 1
        if step.wide or step.left_out:
            self._uneven(step, before, unit, seconds)
        return unit

    def _uneven(self, step: Step, before: float, unit: float, seconds: float) -> None:
        """Rows that had another number of tokens than one."""
        if step.num_prompt_tokens:
            self._mixed_s += seconds
            self._prefill_s += unit * step.num_prompt_tokens
            self._num_prefill += step.num_prompt_tokens
        for wide in step.wide or ():
            request, _, start, num_tokens, first = wide
            if request.finish is not None or request.generation != wide.generation:
                continue
            mine = request.share
            if first:
                mine.paid_from = before
                mine.decodes_from = self._num_steps - 1
            mine.seconds += (num_tokens - 1) * unit
            num_prompt = min(start + num_tokens, request.num_prompt) - start
            if num_prompt > 0:
                mine.prefill_s += num_prompt * unit
                mine.chunks = mine.chunks or []
                if len(mine.chunks) < MAX_CHUNKS:
                    place = (start, num_tokens, step.num_tokens, len(step.members), seconds)
                    mine.chunks.append(Chunk(*place))
            if mine.redo_to and start + num_tokens >= mine.redo_to:
                mine.redone_s += self._mark - mine.placed_at
                mine.redo_to = 0
        for request, generation in step.left_out or ():
            if request.finish is None and request.generation == generation:
                request.share.seconds -= unit

    def late(self, request: Request, row: Row, unit: float) -> None:
        """A row of a request that has been preempted since; what it gave still counts."""
        mine = request.share
        mine.seconds += row.num_tokens * unit
        num_prompt = min(row.start + row.num_tokens, request.num_prompt) - row.start
        if num_prompt > 0:
            mine.prefill_s += num_prompt * unit

    def unclaimed(self, request: Request, row: Row, unit: float) -> None:
        """A row of a request that has ended: computed for nobody, which is as good as idle."""
        num_prompt = max(0, min(row.start + row.num_tokens, request.num_prompt) - row.start)
        self._prefill_s -= num_prompt * unit
        self._idle_s += row.num_tokens * unit

    # ---- waiting -----------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """A plan begins: what the first in the queue lacked, all have waited for until now."""
        if self.blocker is None:
            return
        seconds = now - self._looked_at
        self._blocked_s[self.blocker] += seconds
        for request, own in self.passed:
            request.share.block(own, seconds)
            request.share.block(self.blocker, -seconds)
        self.passed.clear()
        self.blocker = None

    def waits(self, blocker: int, now: float) -> None:
        """The plan is made, and the first of those who still wait lacks this."""
        self.blocker = blocker
        self._looked_at = now

    def num_ready(self, num_waiting: int) -> int:
        """Of so many that wait, who lacks nothing but the next step or what this one computes."""
        if self.blocker == TOKENS:
            return num_waiting
        return sum(blocker == PREFIX for _, blocker in self.passed)

    def pass_over(self, request: Request, blocker: int) -> None:
        """It waits for something of its own, and lets others go ahead."""
        self.passed.append((request, blocker))

    def arrived(self, request: Request, num_waiting: int, num_running: int, now: float) -> None:
        self.start(now)
        mine = request.share
        mine.num_ahead, mine.num_running = num_waiting, num_running
        self._queue(request, now)

    def _queue(self, request: Request, now: float) -> None:
        mine = request.share
        mine.queued_at = now
        mine.blocked_before = tuple(self._blocked_s)
        if self.blocker is not None:  # in the middle of an interval, of which a part is not its own
            mine.block(self.blocker, self._looked_at - now)

    def _leave_queue(self, request: Request, now: float) -> None:
        mine = request.share
        mine.blocked = self._blocked(request, now)
        if request.timeline.num_preemptions:
            mine.waited_again_s += now - mine.queued_at

    def _blocked(self, request: Request, now: float) -> tuple[float, ...]:
        """What it has waited for until now, while it is in the queue."""
        mine = request.share
        sums = zip(mine.blocked, self._blocked_s, mine.blocked_before, strict=True)
        found = [own + total - before for own, total, before in sums]
        if self.blocker is not None:  # since the last plan
            found[self.blocker] += now - self._looked_at
        return tuple(found)

    def placed(self, request: Request, start: int, now: float) -> bool:
        """It has a slot and `start` tokens in the cache; whether that is the first time."""
        self._leave_queue(request, now)
        mine, timeline = request.share, request.timeline
        mine.placed_at = now
        if mine.redo_to:
            mine.num_redone += max(0, mine.redo_to - start)
            if start >= mine.redo_to:
                mine.redo_to = 0
        if timeline.admitted is not None:
            return False
        timeline.admitted, timeline.num_cached = now, start
        return True

    # ---- the end of a run --------------------------------------------------------------------

    def interrupted(self, request: Request, now: float) -> None:
        """It goes back to the queue."""
        self._settle(request)
        request.share.redo_to = max(request.share.redo_to, request.computed)
        self._queue(request, now)

    def _settle(self, request: Request) -> None:
        mine = request.share
        if mine.paid_from is not None:
            mine.seconds += self._rate - mine.paid_from
            mine.paid_from = None

    def first_token(self, request: Request) -> None:
        request.share.decodes_from = self._num_steps
        request.share.mixed_before = self._mixed_s

    def ended(self, request: Request, now: float) -> None:
        """Complete its story, and keep it until someone takes it."""
        if request.slot is None:
            self._leave_queue(request, now)
        trace = self.told(request, now)
        self._saved_s += trace.saved_s
        self.traces.append(trace)

    def told(self, request: Request, now: float) -> RequestTrace:
        """Its story so far."""
        mine, timeline = request.share, replace(request.timeline, num_output=request.num_output)
        seconds = mine.seconds
        if mine.paid_from is not None:
            seconds += self._rate - mine.paid_from
        started = timeline.first_token is not None
        waits = request.slot is None and request.finish is None
        prompt_token_s = self._prefill_s / self._num_prefill if self._num_prefill else 0.0
        return RequestTrace(
            request.request_id,
            timeline,
            request.finish,
            now,
            mine.num_ahead,
            mine.num_running,
            self._blocked(request, now) if waits else mine.blocked,
            mine.short_blocks,
            mine.first_miss,
            mine.why_missed,
            list(mine.chunks or ()),
            self._batch_since(mine.decodes_from) if started else None,
            self._mixed_s - mine.mixed_before if started else 0.0,
            list(mine.drafted or ()),
            list(mine.accepted or ()),
            mine.waited_again_s,
            mine.num_redone,
            mine.redone_s,
            mine.prefill_s,
            seconds - mine.prefill_s,
            timeline.num_cached * prompt_token_s,
        )

    def _batch_since(self, step: int) -> tuple[int, int, int] | None:
        count = min(self._num_steps - step, len(self._rows))
        rows = list(islice(self._rows, len(self._rows) - count, None))
        return (min(rows), median_low(rows), max(rows)) if rows else None

    def account(self) -> Account:
        if self._started is None:
            return Account()
        busy_s = self._mark - self._started - self._idle_s
        return Account(self._prefill_s, busy_s - self._prefill_s, self._idle_s, self._saved_s)
