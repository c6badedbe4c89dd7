"""An engine without a model: the real scheduler with a runner that only advances a virtual clock.

A simulated hour takes seconds, and every run of the same requests gives the same figures.
"""

from __future__ import annotations

from collections.abc import Sequence

from windlass.config import EngineConfig, Limits
from windlass.core.card import Capacity
from windlass.core.make_scheduler import make_scheduler
from windlass.core.types import RowResult, StepPlan, StepResult
from windlass.engine import Engine
from windlass.tools.common.drive import EngineRun, replay
from windlass.tools.common.requests import Request
from windlass.tools.plan.cost_model import CostModel

_TOKEN = 1  # every sampled token; its value does not matter


class VirtualClock:
    """A clock that only the simulation advances."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


class _PendingStep:
    """A launched step; waiting for it advances the clock to its end."""

    def __init__(self, clock: VirtualClock, done_at: float, result: StepResult) -> None:
        self._clock = clock
        self._done_at = done_at
        self._result = result

    def wait(self) -> StepResult:
        self._clock.at = max(self._clock.at, self._done_at)
        return self._result


class SimulatedRunner:
    """Runs one plan after another, each for the time that the cost model gives."""

    def __init__(self, costs: CostModel, clock: VirtualClock) -> None:
        self._costs = costs
        self._clock = clock
        self._busy_until = 0.0

    def run(self, plan: StepPlan) -> StepResult:
        return self.submit(plan).wait()

    def submit(self, plan: StepPlan) -> _PendingStep:
        clock, rows = self._clock, plan.rows
        clock.at += self._costs.host_seconds(len(rows))
        started = max(clock.at, self._busy_until)
        self._busy_until = started + self._costs.device_seconds(rows)
        tokens = [RowResult([_TOKEN] if row.sample else []) for row in rows]
        return _PendingStep(clock, self._busy_until, StepResult(tokens))


def simulate(
    requests: Sequence[Request],
    costs: CostModel,
    *,
    config: EngineConfig,
    limits: Limits,
    capacity: Capacity,
    max_model_len: int,
    max_concurrency: int | None = None,
    overlap: bool = False,
) -> EngineRun:
    """Replay the requests on a simulated engine. `overlap`: schedule during a step, as on CUDA."""
    clock = VirtualClock()
    scheduler = make_scheduler(config, limits, capacity=capacity, max_model_len=max_model_len)
    runner = SimulatedRunner(costs, clock)
    engine = Engine(
        scheduler=scheduler,
        runner=runner,
        clock=clock.now,
        overlap=overlap and config.scheduler.overlap,
    )
    return replay(engine, requests, clock, max_concurrency)
