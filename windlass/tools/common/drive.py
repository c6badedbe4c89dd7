"""Drives an engine in this process: sends requests when they are due, steps it, keeps the timings.

Benchmarks, measured loads and simulated ones go through this one loop. Only the clock and the
engine's runner differ.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from windlass.core.sampling import SamplingParams
from windlass.core.types import NewRequest, Output, Timeline
from windlass.engine import Engine
from windlass.errors import EngineError, RequestError
from windlass.tools.common.requests import Request
from windlass.tools.common.summary import percentile, values_of
from windlass.tools.common.timing import Timing

_IDLE_S = 0.0005  # the rest after a step that computed nothing, such as while a batch fills up
_STATS_EVERY = 4  # steps between two looks at the KV cache, where they must cost nothing

OnTokens = Callable[[int], None]  # gets the number of tokens of each step


class Clock(Protocol):
    """A time that can be waited for."""

    def now(self) -> float: ...

    def rest(self, seconds: float) -> None: ...


class RealClock:
    """The engine's own clock."""

    def now(self) -> float:
        return time.monotonic()

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Window:
    """The steps in which every request decodes: the last has started and none has ended."""

    seconds: float
    steps: int
    tokens: int
    mean_kv: float  # tokens of keys and values that a step reads, all rows together

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class EngineRun:
    """One run of a list of requests on one engine."""

    timings: list[Timing]
    duration: float
    num_steps: int
    prompt_tokens_computed: int
    num_preemptions: int = 0
    num_blocks: int = 0
    peak_blocks: int = 0
    mean_blocks: float = 0.0  # over the time of the run
    peak_waiting: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_chunked: int = 0  # requests whose prompt took several steps
    window: Window | None = None  # None: the requests never all decoded at once

    @property
    def num_output(self) -> int:
        return sum(timing.num_output for timing in self.timings)

    @property
    def num_prompt(self) -> int:
        return sum(timing.num_prompt for timing in self.timings)

    @property
    def num_cached(self) -> int:
        return sum(timing.num_cached or 0 for timing in self.timings)

    @property
    def peak_kv(self) -> float:
        """The largest share of the KV cache that was in use."""
        return self.peak_blocks / self.num_blocks

    @property
    def mean_kv(self) -> float:
        return self.mean_blocks / self.num_blocks

    def row(self) -> dict[str, Any]:
        """The figures of a throughput benchmark; None where there is nothing to measure."""
        seconds, num_output, num_prompt = self.duration, self.num_output, self.num_prompt
        window, steps = self.window, self.num_steps
        figures: dict[str, Any] = {
            "requests": len(self.timings),
            "seconds": round(seconds, 3),
            "output_tok_s": round(num_output / seconds, 2),
            "prompt_tok_s": round(num_prompt / seconds, 2),
            "total_tok_s": round((num_prompt + num_output) / seconds, 2),
            "requests_s": round(len(self.timings) / seconds, 3),
            "steps": steps,
            "step_ms": round(1e3 * seconds / steps, 3) if steps else None,
            "decode_tok_s": None if window is None else round(window.tok_s, 2),
            "decode_step_ms": None if window is None else round(1e3 * window.step_s, 3),
            "prompt_tokens_computed": self.prompt_tokens_computed,
            "preemptions": self.num_preemptions,
        }
        for name, metric in (("ttft", "ttft"), ("tpot", "tpot"), ("e2e", "e2el")):
            values = values_of(self.timings, metric)
            for share in (50, 99):
                known = round(percentile(values, share), 2) if values else None
                figures[f"{name}_p{share}_ms"] = known
        return figures


@dataclass(slots=True)
class StepLog:
    """When each step ended and how many tokens it gave: what a window is found from."""

    num_requests: int
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    all_started: int | None = None  # the step that gave the last request its first token
    first_ended: int | None = None
    _started: set[str] = field(default_factory=set)

    def add(self, outputs: Sequence[Output], now: float) -> list[Output]:
        """Add a step that gave tokens; returns the outputs that end a request."""
        index = len(self.times)
        self.times.append(now)
        self.tokens.append(sum([len(output.tokens) for output in outputs]))
        ended = []
        for output in outputs:
            # First and last outputs carry a timeline; the others cost one look.
            if output.timeline is None and output.finish is None:
                continue
            self._started.add(output.request_id)
            if output.finish is not None:
                ended.append(output)
        if ended and self.first_ended is None:
            self.first_ended = index
        if self.all_started is None and len(self._started) == self.num_requests:
            self.all_started = index
        return ended

    def window(self, num_prompt: int) -> Window | None:
        """`num_prompt`: the prompt tokens of all requests together."""
        first, last = self.all_started, self.first_ended
        if first is None or last is None or last <= first:
            return None
        before, inside = sum(self.tokens[: first + 1]), sum(self.tokens[first + 1 : last + 1])
        return Window(
            seconds=self.times[last] - self.times[first],
            steps=last - first,
            tokens=inside,
            mean_kv=num_prompt + before + inside / 2,
        )


@dataclass(slots=True)
class _Sent:
    """A request in flight."""

    request: Request
    due: float
    sent_at: float
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def run_all(
    engine: Engine,
    requests: Sequence[Request],
    *,
    max_concurrency: int | None = None,
    on_tokens: OnTokens = lambda _: None,
) -> EngineRun:
    """Run requests to their ends at the least cost per step; raises when one fails.

    Times are those of the requests' own timelines: first token and last token.
    """
    driver = _Driver(engine, requests, RealClock(), max_concurrency, on_tokens, every_chunk=False)
    run = driver.run()
    error = next((timing.error for timing in run.timings if timing.error is not None), None)
    if error is not None:
        raise EngineError(f"a request failed: {error}")
    wanted = sum(request.num_output for request in requests)
    if run.num_output != wanted:
        raise EngineError(f"the engine made {run.num_output} tokens; {wanted} were requested.")
    return run


def replay(
    engine: Engine,
    requests: Sequence[Request],
    clock: Clock | None = None,
    max_concurrency: int | None = None,
) -> EngineRun:
    """Run requests to their ends with the time of every chunk; failures are in the timings."""
    driver = _Driver(
        engine, requests, clock or RealClock(), max_concurrency, lambda _: None, every_chunk=True
    )
    return driver.run()


def median_run(runs: Sequence[EngineRun]) -> EngineRun:
    """The run of the median duration; of two the faster."""
    return sorted(runs, key=lambda run: run.duration)[(len(runs) - 1) // 2]


class _Driver:
    """One run of one list of requests on an engine that has no other requests."""

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        clock: Clock,
        max_concurrency: int | None,
        on_tokens: OnTokens,
        every_chunk: bool,
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._clock = clock
        self._limit: float = max_concurrency or math.inf
        self._on_tokens = on_tokens
        self._every_chunk = every_chunk
        self._began = clock.now()
        self._room_since = -math.inf  # since when one more request may be in flight
        self._due: list[tuple[float, int]] = []
        self._after: dict[int, list[int]] = {}  # requests by the one that they follow
        self._sent: dict[str, _Sent] = {}
        self._log = StepLog(len(requests))
        self._num_chunked = 0
        self._timings: list[Timing] = []
        self._peak_blocks = self._peak_waiting = 0
        self._block_seconds = 0.0
        self._looked_at = self._began

    def run(self) -> EngineRun:
        """Until all have ended."""
        engine, clock = self._engine, self._clock
        for index, request in enumerate(self._requests):
            if request.follows is None:
                self._due.append((self._began + request.at, index))
            else:
                self._after.setdefault(request.follows, []).append(index)
        heapq.heapify(self._due)
        before, num_steps = engine.stats(), 0
        every = 1 if self._every_chunk else _STATS_EVERY
        while self._due or self._sent:
            self._send()
            if not self._sent:
                if self._due:
                    clock.rest(max(0.0, self._due[0][0] - clock.now()))
                self._looked_at = clock.now()
                continue
            started = clock.now()
            outputs = engine.step()
            now = clock.now()
            if outputs:
                self._take(outputs, now)
            if now == started:  # nothing was computed: a simulated clock must go on, too
                clock.rest(_IDLE_S)
            num_steps += 1
            if num_steps % every == 0:
                self._look(now)
        after = engine.stats()
        while engine.has_work:  # an overlapped loop has one more step in flight
            engine.step()
        last = max((timing.ended_at for timing in self._timings), default=self._began)
        duration = last - self._began
        return EngineRun(
            timings=self._timings,
            duration=duration,
            num_steps=after.num_steps - before.num_steps,
            prompt_tokens_computed=after.num_prompt_tokens_computed
            - before.num_prompt_tokens_computed,
            num_preemptions=after.num_preemptions - before.num_preemptions,
            num_blocks=after.num_blocks,
            peak_blocks=self._peak_blocks,
            mean_blocks=self._block_seconds / duration if duration > 0 else 0.0,
            peak_waiting=self._peak_waiting,
            num_drafted=after.num_draft_tokens - before.num_draft_tokens,
            num_accepted=after.num_accepted_tokens - before.num_accepted_tokens,
            num_chunked=self._num_chunked,
            window=self._log.window(sum(len(request.prompt) for request in self._requests)),
        )

    def _look(self, now: float) -> None:
        """Take note of the KV cache and the queue."""
        stats = self._engine.stats()
        self._peak_waiting = max(self._peak_waiting, stats.num_waiting)
        self._peak_blocks = max(self._peak_blocks, stats.num_used_blocks)
        self._block_seconds += stats.num_used_blocks * (now - self._looked_at)
        self._looked_at = now

    def _send(self) -> None:
        """Send what is due, as far as the limit of concurrency allows."""
        now = self._clock.now()
        while self._due and self._due[0][0] <= now and len(self._sent) < self._limit:
            due, index = heapq.heappop(self._due)
            request = self._requests[index]
            sent = _Sent(request, due, max(due, self._room_since))
            try:
                self._engine.add(_new_request(index, request))
            except RequestError as error:
                self._end(index, sent, now, str(error), None)
            else:
                self._sent[str(index)] = sent

    def _take(self, outputs: Sequence[Output], now: float) -> None:
        if self._every_chunk:
            for output in outputs:
                if output.tokens:
                    sent = self._sent[output.request_id]
                    sent.times.append(now)
                    sent.tokens.append(len(output.tokens))
        ended = self._log.add(outputs, now)
        self._on_tokens(self._log.tokens[-1])
        for output in ended:
            if len(self._sent) >= self._limit:
                self._room_since = now
            sent = self._sent.pop(output.request_id)
            self._end(int(output.request_id), sent, now, output.error, output.timeline)

    def _end(
        self, index: int, sent: _Sent, now: float, error: str | None, line: Timeline | None
    ) -> None:
        if line is not None:
            self._num_chunked += line.num_chunks > 1
        if line is None or self._every_chunk:
            timing = Timing(
                sent.due,
                sent.sent_at,
                now,
                len(sent.request.prompt),
                sum(sent.tokens),
                tuple(sent.times),
                tuple(sent.tokens),
                error,
                num_cached=line.num_cached if line is not None else None,
            )
        else:
            timing = timing_of(line, sent.due, error)
        self._timings.append(timing)
        for follower in self._after.pop(index, ()):
            due = max(now, self._began + self._requests[follower].at)
            heapq.heappush(self._due, (due, follower))


def timing_of(line: Timeline, asked_at: float | None = None, error: str | None = None) -> Timing:
    """The timing that a timeline tells: its first token, and all others with the last one."""
    chunks: list[tuple[float, int]] = []
    if line.first_token is not None:
        chunks.append((line.first_token, 1))
    if line.last_token is not None and line.num_output > 1:
        chunks.append((line.last_token, line.num_output - 1))
    return Timing(
        line.arrived if asked_at is None else asked_at,
        line.arrived,
        chunks[-1][0] if chunks else line.arrived,
        line.num_prompt,
        line.num_output,
        tuple(at for at, _ in chunks),
        tuple(count for _, count in chunks),
        error,
        num_cached=line.num_cached,
    )


def _new_request(index: int, request: Request) -> NewRequest:
    params = SamplingParams(
        temperature=request.temperature,
        max_tokens=request.num_output,
        ignore_eos=True,
        detokenize=False,
        deterministic=request.deterministic,
    )
    return NewRequest(str(index), request.prompt, params, adapter=request.adapter)
