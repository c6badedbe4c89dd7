"""Sends the requests of a load to an engine in this process, each when it is due, and steps it.

Times are those of the requests' own timelines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from windlass.core.sampling import SamplingParams
from windlass.core.types import EngineStats, NewRequest, Timeline
from windlass.engine import Engine
from windlass.errors import EngineError
from windlass.tools.ladder.work import Job, Work
from windlass.tools.load.timing import Timing

_LOOK_EVERY = 4  # steps between two looks at the cache
_LONGEST_REST = 0.05

Advance = Callable[[int], None]  # gets tokens as they are made


@dataclass(frozen=True, slots=True)
class Driven:
    """One run of one load."""

    timings: list[Timing]
    duration: float
    num_steps: int
    num_computed: int  # prompt tokens
    num_drafts: int  # rows with guesses
    num_drafted: int
    num_accepted: int
    num_preemptions: int
    num_cut: int  # requests whose prompt took several steps
    peak_blocks: int
    mean_blocks: float

    @property
    def num_output(self) -> int:
        return sum(timing.num_output for timing in self.timings)

    @property
    def num_prompt(self) -> int:
        return sum(timing.num_prompt for timing in self.timings)

    @property
    def num_cached(self) -> int:
        return sum(timing.num_cached or 0 for timing in self.timings)


@dataclass(slots=True)
class _Progress:
    """Who waits, who runs, who has ended."""

    jobs: Sequence[Job]
    at_once: int
    left: list[int]
    running: dict[str, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    timelines: dict[int, Timeline] = field(default_factory=dict)

    def due(self, now: float) -> list[int]:
        """Whom to send now, in order; as many as may run."""
        ready = [
            i
            for i in self.left
            if self.jobs[i].at <= now
            and (self.jobs[i].follows is None or self.jobs[i].follows in self.ended)
        ]
        return ready[: self.at_once - len(self.running)]

    def rest(self, now: float) -> float:
        """Seconds until somebody may be due, while nobody runs."""
        coming = [self.jobs[i].at - now for i in self.left]
        return min(_LONGEST_REST, max(0.0, min(coming, default=0.0)))


def drive(engine: Engine, work: Work, advance: Advance = lambda _: None) -> Driven:
    """Run the load to its end; greedy, and every answer as long as it was asked for."""
    jobs = work.jobs
    state = _Progress(jobs, work.at_once or len(jobs), list(range(len(jobs))))
    before = engine.stats()
    looks: list[int] = []
    started = time.monotonic()
    steps = 0
    while state.left or state.running:
        if state.left:
            for index in state.due(time.monotonic() - started):
                state.left.remove(index)
                state.running[str(index)] = index
                engine.add(_request(index, jobs[index]))
        if not state.running:
            time.sleep(state.rest(time.monotonic() - started))
            continue
        _step(engine, state, advance)
        steps += 1
        if steps % _LOOK_EVERY == 0:
            looks.append(engine.stats().num_used_blocks)
    return _driven(state, started, before, engine.stats(), looks)


def _step(engine: Engine, state: _Progress, advance: Advance) -> None:
    num_tokens = 0
    for output in engine.step():
        if output.error is not None:
            raise EngineError(f"a request failed: {output.error}")
        num_tokens += len(output.tokens)
        if output.finish is not None:
            index = state.running.pop(output.request_id)
            assert output.timeline is not None, "a last output carries its timeline"
            state.ended.add(index)
            state.timelines[index] = output.timeline
    if num_tokens:
        advance(num_tokens)


def _request(index: int, job: Job) -> NewRequest:
    wish = SamplingParams(
        temperature=0.0, max_tokens=job.num_output, ignore_eos=True, detokenize=False
    )
    return NewRequest(str(index), job.prompt, wish)


def _driven(
    state: _Progress, started: float, before: EngineStats, after: EngineStats, looks: list[int]
) -> Driven:
    timings = [_timing(started + job.at, state.timelines[i]) for i, job in enumerate(state.jobs)]
    return Driven(
        timings,
        max(timing.ended_at for timing in timings) - started,
        after.num_steps - before.num_steps,
        after.num_prompt_tokens_computed - before.num_prompt_tokens_computed,
        after.num_drafts - before.num_drafts,
        after.num_draft_tokens - before.num_draft_tokens,
        after.num_accepted_tokens - before.num_accepted_tokens,
        after.num_preemptions - before.num_preemptions,
        sum(line.num_chunks > 1 for line in state.timelines.values()),
        max(looks, default=0),
        sum(looks) / max(1, len(looks)),
    )


def _timing(asked_at: float, line: Timeline) -> Timing:
    """Of a request's first and last tokens; those between are not told apart."""
    assert line.first_token is not None
    assert line.last_token is not None
    many = line.num_output > 1
    return Timing(
        asked_at,
        line.arrived,
        line.last_token,
        line.num_prompt,
        line.num_output,
        (line.first_token, line.last_token) if many else (line.first_token,),
        (1, line.num_output - 1) if many else (1,),
        num_cached=line.num_cached,
    )
