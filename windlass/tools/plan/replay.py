"""Sends requests to an engine when they are due and steps it, in real time or in a made-up one.

What was measured and what was predicted come from this same loop: only the clock and the engine's
runner differ.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from windlass.core.sampling import SamplingParams
from windlass.core.types import NewRequest, Output
from windlass.engine import Engine
from windlass.errors import RequestError
from windlass.tools.load.timing import Timing

_TICK = 0.0005  # as long as an engine rests that can compute nothing


@dataclass(frozen=True, slots=True)
class Job:
    """One request: token ids, how many tokens it wants, and when."""

    prompt: list[int]
    num_output: int
    at: float = 0.0  # seconds after the start
    follows: int | None = None  # the job that must have ended before


class Clock(Protocol):
    """A time that can be waited for."""

    def now(self) -> float: ...

    def rest(self, seconds: float) -> None: ...


class RealClock:
    """The engine's own."""

    def now(self) -> float:
        return time.monotonic()

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of the requests, and how the engine stood meanwhile."""

    timings: list[Timing]
    duration: float
    num_steps: int
    num_blocks: int
    peak_blocks: int
    mean_blocks: float
    peak_waiting: int
    num_preemptions: int
    prompt_tokens_computed: int
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def peak_kv(self) -> float:
        """The largest share of the KV cache that was in use."""
        return self.peak_blocks / self.num_blocks

    @property
    def mean_kv(self) -> float:
        return self.mean_blocks / self.num_blocks


@dataclass(slots=True)
class _Sent:
    """A request under way."""

    job: Job
    due: float
    sent_at: float
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class Replay:
    """One run of one list of jobs on an engine that has no other requests."""

    def __init__(
        self, engine: Engine, jobs: Sequence[Job], clock: Clock, max_concurrency: int | None = None
    ) -> None:
        self._engine = engine
        self._jobs = jobs
        self._clock = clock
        self._places: float = max_concurrency or math.inf
        self._room_since = -math.inf  # since when there has been a place for one more
        self._due: list[tuple[float, int]] = []
        self._after: dict[int, list[int]] = {}
        self._sent: dict[str, _Sent] = {}
        self.timings: list[Timing] = []

    def run(self) -> Replayed:
        """Until all have ended."""
        engine, clock = self._engine, self._clock
        began = clock.now()
        for index, job in enumerate(self._jobs):
            if job.follows is None:
                self._due.append((began + job.at, index))
            else:
                self._after.setdefault(job.follows, []).append(index)
        heapq.heapify(self._due)
        self._began = began
        before = engine.stats()
        peak = num_steps = peak_waiting = 0
        total = 0.0
        while self._due or self._sent:
            self._send()
            if not self._sent:
                if self._due:
                    clock.rest(max(0.0, self._due[0][0] - clock.now()))
                continue
            started = clock.now()
            self._take(engine.step())
            now = clock.now()
            if now == started:  # it waits for company: let time pass in a made-up one too
                clock.rest(_TICK)
            stats = engine.stats()
            peak_waiting = max(peak_waiting, stats.num_waiting)
            peak, num_steps = max(peak, stats.num_used_blocks), num_steps + 1
            total += stats.num_used_blocks * (now - started)
        after = engine.stats()
        last = max((timing.ended_at for timing in self.timings), default=began)
        duration = last - began
        return Replayed(
            self.timings,
            duration,
            after.num_steps - before.num_steps,
            after.num_blocks,
            peak,
            total / duration if duration > 0 else 0.0,
            peak_waiting,
            after.num_preemptions - before.num_preemptions,
            after.num_prompt_tokens_computed - before.num_prompt_tokens_computed,
            after.num_draft_tokens - before.num_draft_tokens,
            after.num_accepted_tokens - before.num_accepted_tokens,
        )

    def _send(self) -> None:
        """Whoever is due, as far as there are places."""
        now = self._clock.now()
        while self._due and self._due[0][0] <= now and len(self._sent) < self._places:
            due, index = heapq.heappop(self._due)
            job = self._jobs[index]
            sent = _Sent(job, due, max(due, self._room_since))
            try:
                self._engine.add(_request(index, job))
            except RequestError as error:
                self._end(index, sent, now, str(error))
            else:
                self._sent[str(index)] = sent

    def _take(self, outputs: list[Output]) -> None:
        now = self._clock.now()
        for output in outputs:
            sent = self._sent[output.request_id]
            if output.tokens:
                sent.times.append(now)
                sent.tokens.append(len(output.tokens))
            if output.finish is not None:
                if len(self._sent) >= self._places:
                    self._room_since = now
                del self._sent[output.request_id]
                line = output.timeline
                cached = line.num_cached if line is not None else None
                self._end(int(output.request_id), sent, now, output.error, cached)

    def _end(
        self, index: int, sent: _Sent, now: float, error: str | None, cached: int | None = None
    ) -> None:
        self.timings.append(
            Timing(
                sent.due,
                sent.sent_at,
                now,
                len(sent.job.prompt),
                sum(sent.tokens),
                tuple(sent.times),
                tuple(sent.tokens),
                error,
                num_cached=cached,
            )
        )
        for follower in self._after.pop(index, ()):
            due = max(now, self._began + self._jobs[follower].at)
            heapq.heappush(self._due, (due, follower))


def _request(index: int, job: Job) -> NewRequest:
    wish = SamplingParams(
        temperature=0.0, max_tokens=job.num_output, ignore_eos=True, detokenize=False
    )
    return NewRequest(str(index), job.prompt, wish)
