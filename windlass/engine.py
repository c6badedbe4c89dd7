"""The loop: add requests, step, hand out what came. Takes ready parts and imports no torch.

The plain loop is the definition: plan, run, commit. The overlapped one plans and launches a step
while the tokens of the last are still on their way; a test says that they agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from windlass.core.adapters import Adapters
from windlass.core.card import MemoryReport
from windlass.core.memory import Memory
from windlass.core.scheduler import Scheduler
from windlass.core.trace import RequestTrace
from windlass.core.types import EngineStats, NewRequest, Output, StepPlan, StepResult
from windlass.errors import EngineError, OutOfMemory, UnsupportedError


class PendingStep(Protocol):
    """A step on its way. One that `has_drafts` what follows ends before the next is planned."""

    @property
    def has_drafts(self) -> bool: ...

    def wait(self) -> StepResult: ...


class Runner(Protocol):
    """Something that computes plans, in the order in which they come."""

    def run(self, plan: StepPlan) -> StepResult: ...

    def submit(self, plan: StepPlan) -> PendingStep: ...


class RunnerMemory(Protocol):
    """What the runner and all that belongs to it hold in memory."""

    def held(self) -> MemoryReport: ...

    def sleep(self) -> None:
        """Let go of all that `wake` can get again."""
        ...

    def wake(self) -> None: ...


_REST_S = 0.0005  # while all requests wait for adapters, grammars, or others to fill a batch


class Engine:
    """Owns a scheduler and a runner. Not thread-safe: one thread adds, aborts and steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
        overlap: bool = False,
        memory: RunnerMemory | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._overlap = overlap
        self._memory = memory
        self.asleep = False
        self._in_flight: tuple[StepPlan, PendingStep] | None = None
        self._on_plan: Callable[[StepPlan], None] = _ignore_plan
        scheduler.accounting.start(clock())

    def watch_plans(self, on_plan: Callable[[StepPlan], None]) -> None:
        """Call `on_plan` with each plan before the runner gets it."""
        self._on_plan = on_plan

    def add(self, request: NewRequest) -> None:
        """Queue a request. One that can never fit raises CapacityError now, not later."""
        if self.asleep:
            raise EngineError("the engine sleeps; wake it first.")
        self._scheduler.add(request, self._clock())

    def abort(self, request_id: str) -> None:
        """Forget a request, running or waiting; its blocks are free for the next plan."""
        self._scheduler.abort(request_id, self._clock())

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or self._in_flight is not None

    def step(self) -> list[Output]:
        """Advance by one step; returns what has come of requests since the last."""
        return self._step_overlapped() if self._overlap else self._step_plainly()

    def _step_plainly(self) -> list[Output]:
        plan = self._scheduler.plan(self._clock())
        outputs = self._scheduler.failed
        if not plan.rows:
            self._rest(outputs)
            return outputs
        self._on_plan(plan)
        try:
            result = self._runner.run(plan)
        except OutOfMemory as error:
            return outputs + self._scheduler.retract(plan, str(error))
        return outputs + self._commit(plan, result)

    def _step_overlapped(self) -> list[Output]:
        outputs = []
        if self._in_flight is not None and self._in_flight[1].has_drafts:
            outputs = self._take_in(*self._in_flight)
            self._in_flight = None
        plan = self._scheduler.plan(self._clock())
        outputs += self._scheduler.failed
        launched = None
        if plan.rows:
            self._on_plan(plan)
            try:
                launched = (plan, self._runner.submit(plan))
            except OutOfMemory as error:
                outputs += self._scheduler.retract(plan, str(error))
        before, self._in_flight = self._in_flight, launched
        if before is not None:
            outputs += self._take_in(*before)
        elif launched is None:
            self._rest(outputs)
        return outputs

    def _rest(self, outputs: list[Output]) -> None:
        """Nothing can be computed: let the threads go on that requests wait for."""
        if not outputs and self._scheduler.has_work:
            time.sleep(_REST_S)

    def _take_in(self, plan: StepPlan, pending: PendingStep) -> list[Output]:
        return self._commit(plan, pending.wait())

    def _commit(self, plan: StepPlan, result: StepResult) -> list[Output]:
        return self._scheduler.commit(plan, result, self._clock())

    def fail(self, error: str) -> list[Output]:
        """End every request with an error, after a step that raised; the engine stays usable."""
        self._in_flight = None
        return self._scheduler.fail_all(error)

    @property
    def is_loading(self) -> bool:
        """Whether requests wait for an adapter that is being read."""
        stats = self._scheduler.adapters.stats()
        return stats is not None and stats.num_waiting > 0

    @property
    def adapters(self) -> Adapters:
        """Which there are; load and unload them here."""
        return self._scheduler.adapters

    def reset_prefix_cache(self) -> int:
        """Forget cached blocks that nobody uses; returns how many."""
        return self._scheduler.reset_prefix_cache()

    def memory(self) -> Memory:
        """What the memory holds at this moment."""
        held = self._memory.held() if self._memory is not None else None
        return Memory(self._scheduler.block_use(), self.asleep, held)

    def sleep(self) -> None:
        """Give memory back until `wake`; the prefix cache is lost, and no request may be running."""
        if self.has_work:
            raise EngineError("requests are running; the engine cannot sleep now.")
        if self.asleep:
            return
        if self._memory is None:
            raise UnsupportedError("this engine's memory cannot be given back.")
        self._memory.sleep()
        self._scheduler.reset_prefix_cache()
        self.asleep = True

    def wake(self) -> None:
        """Have all memory again. An engine that is awake stays so."""
        if self.asleep and self._memory is not None:
            self._memory.wake()
        self.asleep = False

    def traces(self) -> list[RequestTrace]:
        """What is to be told of requests that have ended since this was last asked."""
        kept = self._scheduler.accounting.traces
        taken = list(kept)
        kept.clear()
        return taken

    def trace(self, request_id: str) -> RequestTrace | None:
        """What is to be told so far of a request that has not ended."""
        return self._scheduler.trace(request_id, self._clock())

    def stats(self) -> EngineStats:
        return self._scheduler.stats(self._clock())


def _ignore_plan(_plan: StepPlan) -> None:
    """Nobody watches the plans."""
