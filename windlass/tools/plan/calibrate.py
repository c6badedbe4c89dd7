"""Measures the parameters of the cost model by running steps of a model for a few seconds.

Writes to the runner's first KV blocks and slots, so the runner must have no requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, Protocol

from windlass.core.speculation.costs import StepCosts
from windlass.core.types import Row, SlotId, SlotInit, StepPlan, StepResult
from windlass.tools.bench.scheduler import measure as measure_scheduler
from windlass.tools.plan.cost_model import CostModel

_TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
_ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128, 192, 256)
_PASSES = 2  # over all sizes, some seconds apart; the faster pass counts, against disturbances
_REPEATS = 3
_REPEATS_S = 0.3  # per size; fewer repeats for long steps
_MAX_STEP_S = 0.7  # larger steps are extrapolated from the last measured ones
_MAX_TABLE_S = 4.0  # per table and pass
_CONTEXT = 1024
_MANY = 8  # rows with _CONTEXT tokens of context
_CHUNK = 128  # tokens of a prefill chunk after _CONTEXT tokens
_SHORT = 16  # context of rows whose attention time is negligible


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measured costs. `spread`: median difference between two passes; 0.3 is 30 %."""

    costs: CostModel
    spread: float


class StepRunner(Protocol):
    def run(self, plan: StepPlan) -> StepResult: ...


@dataclass(frozen=True, slots=True)
class CalibrationLimits:
    """The largest steps to measure."""

    rows: int
    tokens: int
    positions: int
    block_size: int

    @property
    def num_blocks(self) -> int:
        """KV blocks that the measured steps need."""
        context = min(_CONTEXT, self.positions - 1)
        return max(
            self.rows * self.blocks_of(_SHORT + 1),
            min(self.rows, _MANY) * self.blocks_of(context + 1),
            self.blocks_of(min(self.tokens, self.positions)),
            self.blocks_of(context + min(_CHUNK, self.tokens)),
        )

    def blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def calibrate(
    runner: StepRunner,
    limits: CalibrationLimits,
    windows: tuple[int | None, ...] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> Calibration:
    """Time steps of growing size: the median of a few repeats, and the minimum of two passes."""
    timer = _StepTimer(runner, limits, clock)
    timer.prompt(min(16, limits.tokens), 0)  # warm-up: compiles kernels
    all_rows: dict[int, list[float]] = {}
    all_tokens: dict[int, list[float]] = {}
    for _ in range(_PASSES):
        timer.add_pass(all_rows, _ROWS, limits.rows, lambda size: timer.rows(size, timer.short))
        timer.add_pass(all_tokens, _TOKENS, timer.max_chunk, lambda size: timer.prompt(size, 0))
    rows = {size: min(times) for size, times in all_rows.items()}
    tokens = {size: min(times) for size, times in all_tokens.items()}
    one_kv, many_kv = timer.kv_seconds(1), timer.kv_seconds(min(_MANY, limits.rows))
    pair = timer.pair_seconds()
    net_rows = {
        size: seconds - size * timer.short * (one_kv if size == 1 else many_kv)
        for size, seconds in rows.items()
    }
    net_tokens = {size: seconds - pair * size * (size + 1) / 2 for size, seconds in tokens.items()}
    token_costs = StepCosts(_positive(net_tokens))
    sampling = [
        (seconds - token_costs.of(size)) / size
        for size, seconds in net_rows.items()
        if size in tokens
    ]
    host_s, host_row_s = _scheduling(min(limits.rows, 64))
    costs = CostModel(
        tokens=token_costs,
        rows=StepCosts(_positive(net_rows)),
        choice_s=max(0.0, median(sampling)),
        one_kv_s=one_kv,
        kv_s=many_kv,
        pair_s=pair,
        host_s=host_s,
        host_row_s=host_row_s,
        windows=windows if any(windows) else (),
    )
    return Calibration(costs, _spread([*all_rows.values(), *all_tokens.values()]))


def _spread(passes: Iterable[list[float]]) -> float:
    """Return the median relative difference between the passes of one size."""
    apart = [max(times) / min(times) - 1 for times in passes if len(times) > 1 and min(times) > 0]
    return median(apart) if apart else 0.0


def _positive(points: dict[int, float]) -> dict[int, float]:
    """Clamp to 0, and extrapolate another point if there is only one."""
    found = {size: max(0.0, seconds) for size, seconds in points.items()}
    if len(found) == 1:
        size, seconds = next(iter(found.items()))
        found[2 * size] = 2 * seconds
    return found


def _scheduling(num_rows: int) -> tuple[float, float]:
    """Measure the scheduler's seconds per step and per row."""
    few, many = (
        measure_scheduler(count, steps=40)["step_ms"] / 1e3 for count in (1, max(2, num_rows))
    )
    each = max(0.0, (many - few) / (max(2, num_rows) - 1))
    return max(0.0, few - each), each


class _RowShape(NamedTuple):
    start: int
    num_tokens: int
    sample: bool


class _StepTimer:
    def __init__(
        self, runner: StepRunner, limits: CalibrationLimits, clock: Callable[[], float]
    ) -> None:
        self._runner = runner
        self._limits = limits
        self._clock = clock
        self.short = min(_SHORT, limits.positions - 1)
        self.max_chunk = min(limits.tokens, limits.positions)
        self._context = min(_CONTEXT, limits.positions - 1)

    def add_pass(
        self,
        found: dict[int, list[float]],
        sizes: tuple[int, ...],
        max_size: int,
        seconds: Callable[[int], float],
    ) -> None:
        """Time each size once more, up to `max_size` or until the time limits."""
        began = self._clock()
        for size in sorted({*(size for size in sizes if size < max_size), max_size}):
            times = found.setdefault(size, [])
            times.append(seconds(size))
            too_long = min(times) > _MAX_STEP_S or self._clock() - began > _MAX_TABLE_S
            if len(found) > 1 and too_long:
                break

    def rows(self, count: int, context: int) -> float:
        """Time a decode step of `count` rows with `context` tokens each."""
        return self._time([_RowShape(context - 1, 1, sample=True)] * count)

    def prompt(self, num_tokens: int, start: int) -> float:
        """Time a prefill chunk."""
        return self._time([_RowShape(start, num_tokens, sample=False)])

    def kv_seconds(self, count: int) -> float:
        """Return seconds per KV token that a step of `count` decode rows reads."""
        if self._context <= self.short:
            return 0.0
        far, near = (
            min(self.rows(count, length) for _ in range(_PASSES))
            for length in (self._context, self.short)
        )
        return max(0.0, (far - near) / (count * (self._context - self.short)))

    def pair_seconds(self) -> float:
        """Return seconds per pair of a prefill token and a KV token before the chunk."""
        count = min(_CHUNK, self.max_chunk)
        start = min(self._context, self._limits.positions - count)
        if start < 1:
            return 0.0
        far, near = (min(self.prompt(count, at) for _ in range(_PASSES)) for at in (start, 0))
        return max(0.0, (far - near) / (count * start))

    def _time(self, shapes: list[_RowShape]) -> float:
        """Return the median of a few runs; the first run, which admits the requests, is not timed."""
        plan = self._plan(shapes)
        self._runner.run(plan)
        again = StepPlan([row._replace(blocks=()) for row in plan.rows])
        times: list[float] = []
        while len(times) < _REPEATS and sum(times) < _REPEATS_S:
            started = self._clock()
            self._runner.run(again)
            times.append(self._clock() - started)
        return median(times)

    def _plan(self, shapes: list[_RowShape]) -> StepPlan:
        rows, admitted, used = [], [], 0
        for i, (start, count, sample) in enumerate(shapes):
            needed = self._limits.blocks_of(start + count)
            blocks = range(used, used + needed)
            used += needed
            slot = SlotId(i)
            known = [0] * (start + count)
            num_prompt = start if sample else len(known)
            admitted.append(SlotInit.greedy(slot, known, num_prompt=num_prompt))
            row = Row.unowned(slot, (0,) * count, start=start, blocks=blocks)
            rows.append(row._replace(sample=sample))
        return StepPlan(rows, admitted, freed=[row.slot for row in rows])
