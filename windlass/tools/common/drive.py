"""Drives an in-process engine: sends requests at their arrival times, steps, records timings.

Benchmarks, measured loads and simulated loads share this loop. Only the clock and the engine's
runner differ.
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
from windlass.tools.common.requests import Request, Timing
from windlass.tools.common.summary import percentile, values_of

_IDLE_S = 0.0005  # sleep after a step that computed nothing, such as while a batch fills
_STATS_EVERY = 4  # steps between two reads of the engine's statistics in throughput runs

OnTokens = Callable[[int], None]  # receives the number of tokens of each step


class Clock(Protocol):
    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class RealClock:
    """The engine's own clock."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Window:
    """The steps in which every request decodes: all have started and none has finished."""

    seconds: float
    steps: int
    tokens: int
    mean_kv: float  # KV tokens that a step reads, over all rows

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
    mean_blocks: float = 0.0  # averaged over time
    peak_waiting: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_chunked: int = 0  # requests whose prompt was computed in several steps
    window: Window | None = None  # None: the requests never all decoded together

    @property
    def num_output(self) -> int:
        return sum(timing.num_output for timing in self.timings)

    @property
    def tok_s(self) -> float:
        """Output tokens per second of the whole run."""
        return self.num_output / self.duration

    @property
    def num_prompt(self) -> int:
        return sum(timing.num_prompt for timing in self.timings)

    @property
    def num_cached(self) -> int:
        return sum(timing.num_cached or 0 for timing in self.timings)

    @property
    def peak_kv(self) -> float:
        """Peak share of the KV cache in use."""
        return self.peak_blocks / self.num_blocks

    @property
    def mean_kv(self) -> float:
        return self.mean_blocks / self.num_blocks

    def row(self) -> dict[str, Any]:
        """The figures of a throughput benchmark; None where a figure does not apply."""
        seconds, num_output, num_prompt = self.duration, self.num_output, self.num_prompt
        window, steps = self.window, self.num_steps
        figures: dict[str, Any] = {
            "requests": len(self.timings),
            "seconds": round(seconds, 3),
            "output_tok_s": round(self.tok_s, 2),
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
                value = round(percentile(values, share), 2) if values else None
                figures[f"{name}_p{share}_ms"] = value
        return figures


@dataclass(slots=True)
class StepLog:
    """End time and token count of each step, from which the decode window is found."""

    num_requests: int
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    all_started: int | None = None  # step of the last request's first token
    first_ended: int | None = None  # step in which the first request finished
    _started: set[str] = field(default_factory=set)

    def add(self, outputs: Sequence[Output], now: float) -> list[Output]:
        """Add a step with outputs; returns the outputs that finish a request."""
        index = len(self.times)
        self.times.append(now)
        self.tokens.append(sum([len(output.tokens) for output in outputs]))
        ended = []
        for output in outputs:
            # Only the first and last outputs of a request carry a timeline.
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
        """The decode window; `num_prompt` is the total of prompt tokens."""
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
    """Run all requests with minimal overhead per step; raises when one fails.

    Timings come from the requests' own timelines: first token and last token.
    """
    driver = _Driver(
        engine,
        requests,
        RealClock(),
        max_concurrency=max_concurrency,
        on_tokens=on_tokens,
        every_chunk=False,
    )
    run = driver.run()
    error = next((timing.error for timing in run.timings if timing.error is not None), None)
    if error is not None:
        raise EngineError(f"a request failed: {error}")
    expected = sum(request.num_output for request in requests)
    if run.num_output != expected:
        raise EngineError(f"the engine generated {run.num_output} tokens; expected {expected}.")
    return run


def replay(
    engine: Engine,
    requests: Sequence[Request],
    clock: Clock | None = None,
    max_concurrency: int | None = None,
) -> EngineRun:
    """Run all requests and record the time of every chunk; failures are in the timings."""
    driver = _Driver(
        engine,
        requests,
        clock or RealClock(),
        max_concurrency=max_concurrency,
        on_tokens=lambda _: None,
        every_chunk=True,
    )
    return driver.run()


def median_run(runs: Sequence[EngineRun]) -> EngineRun:
    """The run with the median duration; the faster of the middle two."""
    return sorted(runs, key=lambda run: run.duration)[(len(runs) - 1) // 2]


class _Driver:
    """One run of a list of requests on an otherwise idle engine."""

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        clock: Clock,
        *,
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
        self._room_since = -math.inf  # when the concurrency limit last allowed another request
        self._due: list[tuple[float, int]] = []  # heap of (arrival time, index)
        self._followers: dict[int, list[int]] = {}  # by the request that they follow
        self._sent: dict[str, _Sent] = {}
        self._log = StepLog(len(requests))
        self._num_chunked = 0
        self._timings: list[Timing] = []
        self._peak_blocks = self._peak_waiting = 0
        self._block_seconds = 0.0
        self._sampled_at = self._began

    def run(self) -> EngineRun:
        """Run until all requests have finished."""
        engine, clock = self._engine, self._clock
        for index, request in enumerate(self._requests):
            if request.follows is None:
                self._due.append((self._began + request.at, index))
            else:
                self._followers.setdefault(request.follows, []).append(index)
        heapq.heapify(self._due)
        before, num_steps = engine.stats(), 0
        every = 1 if self._every_chunk else _STATS_EVERY
        while self._due or self._sent:
            self._send()
            if not self._sent:
                if self._due:
                    clock.sleep(max(0.0, self._due[0][0] - clock.now()))
                self._sampled_at = clock.now()
                continue
            started = clock.now()
            outputs = engine.step()
            now = clock.now()
            if outputs:
                self._record(outputs, now)
            if now == started:  # nothing was computed; a simulated clock must advance too
                clock.sleep(_IDLE_S)
            num_steps += 1
            if num_steps % every == 0:
                self._sample_stats(now)
        after = engine.stats()
        while engine.has_work:  # an overlapped loop still has one step in flight
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

    def _sample_stats(self, now: float) -> None:
        """Sample the KV cache usage and the queue length."""
        stats = self._engine.stats()
        self._peak_waiting = max(self._peak_waiting, stats.num_waiting)
        self._peak_blocks = max(self._peak_blocks, stats.num_used_blocks)
        self._block_seconds += stats.num_used_blocks * (now - self._sampled_at)
        self._sampled_at = now

    def _send(self) -> None:
        """Send due requests up to the concurrency limit."""
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

    def _record(self, outputs: Sequence[Output], now: float) -> None:
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
                due_at=sent.due,
                sent_at=sent.sent_at,
                ended_at=now,
                num_prompt=len(sent.request.prompt),
                num_output=sum(sent.tokens),
                times=tuple(sent.times),
                tokens=tuple(sent.tokens),
                error=error,
                num_cached=line.num_cached if line is not None else None,
            )
        else:
            timing = timing_of(line, sent.due, error)
        self._timings.append(timing)
        for follower in self._followers.pop(index, ()):
            due = max(now, self._began + self._requests[follower].at)
            heapq.heappush(self._due, (due, follower))


def timing_of(line: Timeline, due_at: float | None = None, error: str | None = None) -> Timing:
    """Convert a timeline: the first token, then all others at the time of the last."""
    chunks: list[tuple[float, int]] = []
    if line.first_token is not None:
        chunks.append((line.first_token, 1))
    if line.last_token is not None and line.num_output > 1:
        chunks.append((line.last_token, line.num_output - 1))
    return Timing(
        due_at=line.arrived if due_at is None else due_at,
        sent_at=line.arrived,
        ended_at=chunks[-1][0] if chunks else line.arrived,
        num_prompt=line.num_prompt,
        num_output=line.num_output,
        times=tuple(at for at, _ in chunks),
        tokens=tuple(count for _, count in chunks),
        error=error,
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
