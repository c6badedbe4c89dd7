"""The loop: add requests, step, hand out what came. Takes ready parts and imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from windlass.core.scheduler import Scheduler
from windlass.core.types import EngineStats, NewRequest, Output, StepPlan, StepResult


class Runner(Protocol):
    """Something that computes a plan."""

    def run(self, plan: StepPlan) -> StepResult: ...


class Engine:
    """Owns a scheduler and a runner. Not thread-safe: one thread adds, aborts and steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock

    def add(self, request: NewRequest) -> None:
        """Queue a request. One that can never fit raises CapacityError now, not later."""
        self._scheduler.add(request, self._clock())

    def abort(self, request_id: str) -> None:
        """Forget a request, running or waiting; its blocks are free for the next plan."""
        self._scheduler.abort(request_id)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def step(self) -> list[Output]:
        """Plan, run, commit: the whole engine."""
        plan = self._scheduler.plan(self._clock())
        if not plan.rows:
            return []
        result = self._runner.run(plan)
        return self._scheduler.commit(plan, result, self._clock())

    def fail(self, error: str) -> list[Output]:
        """End every request with an error, after a step that raised; the engine stays usable."""
        return self._scheduler.fail_all(error)

    def reset_prefix_cache(self) -> int:
        """Forget cached blocks that nobody uses; returns how many."""
        return self._scheduler.reset_prefix_cache()

    def stats(self) -> EngineStats:
        return self._scheduler.stats()
