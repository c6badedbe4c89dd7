"""Runs a workload on an engine and reads the numbers off the requests' own timelines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from windlass.core.sampling import SamplingParams
from windlass.core.types import NewRequest, Output, Timeline
from windlass.engine import Engine
from windlass.errors import EngineError
from windlass.tools.bench.workloads import Job


@dataclass(frozen=True, slots=True)
class Window:
    """The steps in which every request of the workload decodes: none starts, none has ended."""

    seconds: float
    steps: int
    tokens: int
    mean_kv: float  # tokens of keys and values that a step reads, all rows together

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of one workload."""

    seconds: float
    num_prompt: int
    num_output: int
    timelines: list[Timeline]
    steps: int
    prompt_tokens_computed: int
    preemptions: int = 0
    window: Window | None = None  # None: the requests never all decoded at once

    def row(self) -> dict[str, Any]:
        """The figures people ask for; times in milliseconds, None where there is nothing to say."""
        first = [t.first_token - t.arrived for t in self.timelines if t.first_token is not None]
        per_token = [
            (t.last_token - t.first_token) / (t.num_output - 1)
            for t in self.timelines
            if t.first_token is not None and t.last_token is not None and t.num_output > 1
        ]
        total = [t.last_token - t.arrived for t in self.timelines if t.last_token is not None]
        figures: dict[str, Any] = {
            "requests": len(self.timelines),
            "seconds": round(self.seconds, 3),
            "output_tok_s": round(self.num_output / self.seconds, 2),
            "prompt_tok_s": round(self.num_prompt / self.seconds, 2),
            "total_tok_s": round((self.num_prompt + self.num_output) / self.seconds, 2),
            "requests_s": round(len(self.timelines) / self.seconds, 3),
            "steps": self.steps,
            "step_ms": round(1e3 * self.seconds / self.steps, 3) if self.steps else None,
            "decode_tok_s": None,
            "decode_step_ms": None,
            "prompt_tokens_computed": self.prompt_tokens_computed,
            "preemptions": self.preemptions,
        }
        if self.window is not None:
            figures["decode_tok_s"] = round(self.window.tokens / self.window.seconds, 2)
            figures["decode_step_ms"] = round(1e3 * self.window.step_s, 3)
        for name, values in (("ttft", first), ("tpot", per_token), ("e2e", total)):
            for share in (50, 99):
                known = round(1e3 * percentile(values, share), 2) if values else None
                figures[f"{name}_p{share}_ms"] = known
        return figures


@dataclass(slots=True)
class Ticks:
    """When each step ended and how many tokens it gave: what a window is found from."""

    num_requests: int
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    all_started: int | None = None  # the step that gave the last request its first token
    first_ended: int | None = None
    timelines: list[Timeline] = field(default_factory=list)
    _started: set[str] = field(default_factory=set)

    def add(self, outputs: Sequence[Output], now: float) -> None:
        """Take in what a step gave; one that gave nothing yet is part of the next."""
        if not outputs:
            return
        index = len(self.times)
        self.times.append(now)
        self.tokens.append(sum([len(output.tokens) for output in outputs]))
        for output in outputs:
            # A request's first and last outputs carry its timeline; the others cost one look.
            if output.timeline is None:
                continue
            self._started.add(output.request_id)
            if output.finish is not None:
                self.timelines.append(output.timeline)
                if self.first_ended is None:
                    self.first_ended = index
        if self.all_started is None and len(self._started) == self.num_requests:
            self.all_started = index

    def window(self, num_prompt: int) -> Window | None:
        """`num_prompt`: of all requests together."""
        first, last = self.all_started, self.first_ended
        if first is None or last is None or last <= first:
            return None
        before, inside = sum(self.tokens[: first + 1]), sum(self.tokens[first + 1 : last + 1])
        return Window(
            self.times[last] - self.times[first],
            last - first,
            inside,
            num_prompt + before + inside / 2,
        )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` percent of all do not exceed; 0 when there is none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)]


def run(
    engine: Engine, jobs: Sequence[Job], progress: Callable[[int], None] = lambda _: None
) -> Measured:
    """Send all jobs at once and step until the last has ended. `progress` gets tokens made."""
    requests = [
        NewRequest(f"bench-{i}", job.prompt, _wish(job), adapter=job.adapter)
        for i, job in enumerate(jobs)
    ]
    before = engine.stats()
    ticks = Ticks(len(jobs))
    started = time.perf_counter()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        outputs = engine.step()
        ticks.add(outputs, time.perf_counter())
        progress(ticks.tokens[-1] if outputs else 0)
    seconds = time.perf_counter() - started
    after = engine.stats()
    made, wanted = sum(ticks.tokens), sum(job.num_output for job in jobs)
    if made != wanted:
        raise EngineError(f"the engine made {made} tokens; {wanted} were asked for.")
    num_prompt = sum(len(job.prompt) for job in jobs)
    return Measured(
        seconds,
        num_prompt,
        made,
        ticks.timelines,
        after.num_steps - before.num_steps,
        after.num_prompt_tokens_computed - before.num_prompt_tokens_computed,
        after.num_preemptions - before.num_preemptions,
        ticks.window(num_prompt),
    )


def _wish(job: Job) -> SamplingParams:
    return SamplingParams(
        temperature=job.temperature,
        max_tokens=job.num_output,
        ignore_eos=True,
        detokenize=False,
        deterministic=job.deterministic,
    )
