"""An engine without a model: the real scheduler over a runner that only lets time pass.

Time is made up, so that a run of an hour takes seconds and gives the same figures every time.
"""

from __future__ import annotations

from collections.abc import Sequence

from windlass.build import make_scheduler
from windlass.config import EngineConfig, Limits
from windlass.core.card import Capacity
from windlass.core.types import RowResult, StepPlan, StepResult
from windlass.engine import Engine
from windlass.tools.common.drive import EngineRun, replay
from windlass.tools.common.requests import Request
from windlass.tools.plan.costs import CostModel

_TOKEN = 1  # whatever comes; nobody reads it


class VirtualClock:
    """A time that passes when it is told to."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def rest(self, seconds: float) -> None:
        self.at += seconds


class _Step:
    """A step on its way until a moment."""

    has_drafts = False

    def __init__(self, clock: VirtualClock, done_at: float, result: StepResult) -> None:
        self._clock = clock
        self._done_at = done_at
        self._result = result

    def wait(self) -> StepResult:
        self._clock.at = max(self._clock.at, self._done_at)
        return self._result


class SimulatedRunner:
    """Takes as long for a plan as the cost model says, one plan after the other."""

    def __init__(self, costs: CostModel, clock: VirtualClock) -> None:
        self._costs = costs
        self._clock = clock
        self._busy_until = 0.0

    def run(self, plan: StepPlan) -> StepResult:
        return self.submit(plan).wait()

    def submit(self, plan: StepPlan) -> _Step:
        clock, rows = self._clock, plan.rows
        clock.at += self._costs.host_seconds(len(rows))
        started = max(clock.at, self._busy_until)
        self._busy_until = started + self._costs.device_seconds(rows)
        tokens = [RowResult([_TOKEN] if row.sample else []) for row in rows]
        return _Step(clock, self._busy_until, StepResult(tokens))


def simulate(
    config: EngineConfig,
    limits: Limits,
    capacity: Capacity,
    max_model_len: int,
    costs: CostModel,
    requests: Sequence[Request],
    max_concurrency: int | None = None,
    overlap: bool = False,
) -> EngineRun:
    """Let an engine of these settings answer the requests. `overlap`: as on CUDA."""
    clock = VirtualClock()
    scheduler = make_scheduler(config, limits, capacity, max_model_len)
    runner = SimulatedRunner(costs, clock)
    engine = Engine(scheduler, runner, clock.now, overlap and config.scheduler.overlap)
    return replay(engine, requests, clock, max_concurrency)
