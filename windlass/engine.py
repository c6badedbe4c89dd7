"""The engine loop: add requests, step, return outputs. Does not import torch.

The synchronous loop is the reference: plan, run, commit. The pipelined loop plans and launches steps
before the tokens of earlier ones have arrived: one step ahead on CUDA, so that planning overlaps with
computing, and one step per pipeline stage, so that no stage is idle. Tests compare the loops.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from windlass.core.adapters import Adapters
from windlass.core.card import MemoryReport
from windlass.core.expert_load import ExpertLoadMonitor
from windlass.core.handover import BlockExport, BlockImport, HandedBlocks, NoExport, Transfers
from windlass.core.limits import EngineCaps
from windlass.core.memory import Memory
from windlass.core.scheduler import Scheduler
from windlass.core.trace import RequestTrace
from windlass.core.types import (
    EngineStats,
    NewRequest,
    Output,
    PinnedPrefix,
    StepPlan,
    StepResult,
)
from windlass.errors import EngineError, OutOfMemory, UnsupportedError


class PendingStep(Protocol):
    """A launched step."""

    def wait(self) -> StepResult: ...


class Runner(Protocol):
    """Executes plans in the order of submission."""

    def run(self, plan: StepPlan) -> StepResult: ...

    def submit(self, plan: StepPlan) -> PendingStep: ...


class RunnerMemory(Protocol):
    """Memory of the runner and of everything that it owns."""

    def held(self) -> MemoryReport: ...

    def sleep(self) -> None:
        """Free all memory that `wake` can restore."""
        ...

    def wake(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EnginePeers:
    """Stores that this engine shares with others; None: it shares none."""

    export: BlockExport | None = None
    imports: BlockImport | None = None


_IDLE_S = 0.0005  # pause while all requests wait for adapters, grammars or a full static batch


class Engine:
    """Owns a scheduler and a runner. Not thread-safe: one thread adds, aborts and steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
        overlap: bool = False,
        memory: RunnerMemory | None = None,
        expert_load: ExpertLoadMonitor | None = None,
        peers: EnginePeers = EnginePeers(),  # noqa: B008
        capture_next: Callable[[], bool] = lambda: False,
    ) -> None:
        """`capture_next`: captures a graph that was left for later, if there is one."""
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._max_in_flight = max(1 + overlap, scheduler.num_stages)
        self._memory = memory
        self._expert_load = expert_load
        self._imports = peers.imports
        self._capture_next = capture_next
        self._transfers = Transfers(peers.export or NoExport(), scheduler.tiers.save)
        self.asleep = False
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()  # the oldest first
        self._on_plan: Callable[[StepPlan], None] = _ignore_plan
        scheduler.accounting.start(clock())

    def watch_plans(self, on_plan: Callable[[StepPlan], None]) -> None:
        """Call `on_plan` with each plan before the runner gets it."""
        self._on_plan = on_plan

    def add(self, request: NewRequest, handed: HandedBlocks | None = None) -> None:
        """Queue a request. Raises CapacityError if it can never fit.

        `handed`: where another engine has put blocks of its prompt.
        """
        if self.asleep:
            raise EngineError("the engine is asleep; wake it first.")
        if handed is not None and self._imports is not None:
            self._imports.announce(handed)
        self._scheduler.add(request, self._clock())

    def abort(self, request_id: str) -> None:
        """Drop a running or queued request. The next plan can use its blocks."""
        self._scheduler.abort(request_id, self._clock())

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._in_flight)

    def capture_next(self) -> bool:
        """Capture a graph that was left for later, if nothing else is to be done; False: none was."""
        return not self.has_work and not self.asleep and self._capture_next()

    def step(self) -> list[Output]:
        """Advance by one step. Returns the outputs since the previous call."""
        if self._max_in_flight == 1:
            return self._step_synchronously()
        return self._step_pipelined()

    def _step_synchronously(self) -> list[Output]:
        plan = self._scheduler.plan(self._clock())
        outputs = self._scheduler.failed
        if not plan.rows:
            if not self._moves_blocks(plan, self._runner.run):
                self._idle(outputs)
            return outputs
        self._on_plan(plan)
        try:
            result = self._runner.run(plan)
        except OutOfMemory as error:
            return outputs + self._scheduler.retract(plan, str(error))
        return outputs + self._commit(plan, result)

    def _step_pipelined(self) -> list[Output]:
        """Launch a step, and commit the oldest one when enough are in flight or none can start."""
        outputs: list[Output] = []
        # Between pipeline stages a plan has no row of a request whose sample is in flight.
        if self._in_flight and self._scheduler.num_stages == 1:
            (latest, _) = self._in_flight[-1]
            if latest.options.next_plan_waits:
                outputs += self._finish_oldest()
        plan = self._scheduler.plan(self._clock())
        outputs += self._scheduler.failed
        num_before, moved = len(self._in_flight), False
        if not plan.rows:
            moved = self._moves_blocks(plan, self._runner.submit)
        else:
            self._on_plan(plan)
            try:
                self._in_flight.append((plan, self._runner.submit(plan)))
            except OutOfMemory as error:
                outputs += self._scheduler.retract(plan, str(error))
        started = len(self._in_flight) > num_before
        if len(self._in_flight) == self._max_in_flight or (self._in_flight and not started):
            outputs += self._finish_oldest()
        elif not started and not moved:
            self._idle(outputs)
        return outputs

    def _moves_blocks(self, plan: StepPlan, run: Callable[[StepPlan], object]) -> bool:
        """Run the saves and loads of a plan without rows; returns whether there are any."""
        if not (plan.saves or plan.loads):
            return False
        run(plan)  # the result is empty, and the scheduler expects none
        return True

    def _idle(self, outputs: list[Output]) -> None:
        """Nothing can run: yield to the threads that read adapters and compile grammars."""
        if not outputs and self._scheduler.has_work:
            time.sleep(_IDLE_S)

    def _finish_oldest(self) -> list[Output]:
        plan, pending = self._in_flight[0]
        result = pending.wait()
        self._in_flight.popleft()
        return self._commit(plan, result)

    def _commit(self, plan: StepPlan, result: StepResult) -> list[Output]:
        return self._scheduler.commit(plan, result, self._clock())

    @property
    def is_handing_over(self) -> bool:
        """Whether blocks are on their way to other engines; `handed_over` advances them."""
        return bool(self._transfers) or bool(self._scheduler.handed_over)

    def handed_over(self) -> list[tuple[str, HandedBlocks]]:
        """The requests of `hand_over` whose blocks other engines can read since the previous call."""
        if not self.is_handing_over:
            return []
        now, new = self._clock(), self._scheduler.handed_over
        for request_id, keys in new:
            self._transfers.begin(request_id, keys, now)
        new.clear()
        return self._transfers.ended(now)

    def fail(self, error: str) -> list[Output]:
        """End the running requests with an error after a step raised. Queued requests go on."""
        self._in_flight.clear()
        return self._scheduler.fail_running(error)

    @property
    def adapters(self) -> Adapters:
        """The registered adapters. Load and unload them through this object."""
        return self._scheduler.adapters

    def set_caps(self, caps: EngineCaps) -> None:
        """Change the limits of the next steps."""
        self._scheduler.set_caps(caps)

    def reset_prefix_cache(self) -> int:
        """Drop cached blocks that no request uses, also in host memory. Returns those of the device."""
        self._scheduler.tiers.clear()
        return self._scheduler.reset_prefix_cache()

    def pin_prefix(self, name: str, request: NewRequest, on_device: bool = True) -> PinnedPrefix:
        """Keep the cached blocks of a prompt from eviction; a prompt that is not cached is not pinned.

        `on_device` False: only KV tiers keep them.
        """
        if self.asleep:
            raise EngineError("the engine is asleep; wake it first.")
        return self._scheduler.pins.pin(name, request, on_device=on_device)

    def unpin_prefix(self, name: str) -> int:
        """Let the blocks of a named prefix be evicted again. Returns their number."""
        return self._scheduler.pins.unpin(name)

    def memory(self) -> Memory:
        """Report the current use of memory."""
        held = self._memory.held() if self._memory is not None else None
        scheduler = self._scheduler
        return Memory(scheduler.block_use(), self.asleep, held, scheduler.adapters.uses())

    def sleep(self) -> None:
        """Free memory until `wake`. Drops the prefix cache and its pins. No request may be running."""
        if self._scheduler.has_requests or self._in_flight:
            raise EngineError("requests are running; the engine cannot sleep.")
        if self.asleep:
            return
        self.finish_moves()
        if self._memory is None:
            raise UnsupportedError("this engine cannot free its memory.")
        self._memory.sleep()
        self._scheduler.pins.clear()
        self._scheduler.reset_prefix_cache()
        self.asleep = True

    def finish_moves(self) -> None:
        """Copy the blocks that KV tiers still save or load, if no request is running."""
        while self.has_work and not self._scheduler.has_requests:
            self.step()

    def close(self) -> None:
        """Store what KV tiers still save. No step may follow."""
        if not self._scheduler.tiers.has_stores:
            return
        try:
            self.finish_moves()
        finally:
            self._scheduler.tiers.close()

    def wake(self) -> None:
        """Restore the memory. Does nothing if the engine is awake."""
        if self.asleep and self._memory is not None:
            self._memory.wake()
        self.asleep = False

    def traces(self) -> list[RequestTrace]:
        """Return and clear the traces of requests that ended since the previous call."""
        kept = self._scheduler.accounting.traces
        taken = list(kept)
        kept.clear()
        return taken

    def trace(self, request_id: str) -> RequestTrace | None:
        """The trace so far of a request that has not ended; None if it is unknown."""
        return self._scheduler.trace(request_id, self._clock())

    def update_expert_load(self) -> None:
        """Read the load of experts for the stats, and record it, if it is counted."""
        if self._expert_load is not None:
            self._expert_load.update()

    def stats(self) -> EngineStats:
        stats = self._scheduler.stats(self._clock())
        if self._expert_load is not None:
            stats.experts = self._expert_load.stats
        return stats


def _ignore_plan(_plan: StepPlan) -> None:
    """Default of `watch_plans`."""
