"""Runs a workload on an engine and reads the numbers off the requests' own timelines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.core.sampling import SamplingParams
from windlass.core.types import EngineStats, NewRequest, Timeline
from windlass.engine import Engine
from windlass.tools.bench.workloads import Job


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of one workload."""

    seconds: float
    num_prompt: int
    num_output: int
    timelines: list[Timeline]
    before: EngineStats
    after: EngineStats

    def row(self) -> dict[str, Any]:
        """The figures people ask for; times in milliseconds."""
        first = [t.first_token - t.arrived for t in self.timelines if t.first_token is not None]
        per_token = [
            (t.last_token - t.first_token) / (t.num_output - 1)
            for t in self.timelines
            if t.first_token is not None and t.last_token is not None and t.num_output > 1
        ]
        total = [t.last_token - t.arrived for t in self.timelines if t.last_token is not None]
        steps = self.after.num_steps - self.before.num_steps
        figures: dict[str, Any] = {
            "requests": len(self.timelines),
            "seconds": round(self.seconds, 3),
            "output_tok_s": round(self.num_output / self.seconds, 2),
            "total_tok_s": round((self.num_prompt + self.num_output) / self.seconds, 2),
            "requests_s": round(len(self.timelines) / self.seconds, 3),
            "steps": steps,
            "step_ms": round(1e3 * self.seconds / steps, 3) if steps else None,
            "prompt_tokens_computed": self.after.num_prompt_tokens_computed
            - self.before.num_prompt_tokens_computed,
            "preemptions": self.after.num_preemptions - self.before.num_preemptions,
        }
        for name, values in (("ttft", first), ("tpot", per_token), ("e2e", total)):
            for share in (50, 99):
                figures[f"{name}_p{share}_ms"] = round(1e3 * percentile(values, share), 2)
        return figures


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
    wishes = [SamplingParams(temperature=0, max_tokens=j.num_output, ignore_eos=True) for j in jobs]
    before = engine.stats()
    started = time.perf_counter()
    for i, (job, wish) in enumerate(zip(jobs, wishes, strict=True)):
        engine.add(NewRequest(f"bench-{i}", job.prompt, wish))
    timelines: list[Timeline] = []
    while engine.has_work:
        for output in engine.step():
            progress(len(output.tokens))
            if output.finish is not None:
                assert output.timeline is not None
                timelines.append(output.timeline)
    return Measured(
        time.perf_counter() - started,
        sum(len(job.prompt) for job in jobs),
        sum(job.num_output for job in jobs),
        timelines,
        before,
        engine.stats(),
    )
