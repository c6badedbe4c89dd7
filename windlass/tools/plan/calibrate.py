"""Finds what steps cost, by running some on a model in this process for a few seconds.

Writes to the runner's first KV blocks and uses its first slots: it must have no request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from windlass.core.sampling import SamplingParams
from windlass.core.types import BlockId, Row, SlotId, SlotInit, StepPlan, StepResult
from windlass.speculative.costs import StepCosts
from windlass.tools.bench.scheduler import measure as measure_scheduler
from windlass.tools.plan.costs import CostModel

_TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
_ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128, 192, 256)
_PASSES = 2  # over all sizes, some seconds apart: what disturbs one of them does not count
_REPEATS = 3
_REPEATS_S = 0.3  # of one size; long steps are repeated less
_LONGEST_S = 0.7  # longer steps are taken to cost as the last ones suggest
_ENOUGH_S = 4.0  # for each table and pass
_CONTEXT = 1024
_MANY = 8  # rows with so much context
_CHUNK = 128  # tokens of a prompt after so much context
_SHORT = 16  # context of rows whose attention hardly counts


@dataclass(frozen=True, slots=True)
class Calibration:
    """Costs, and how far two passes over the same steps were apart: 0.3 is 30 %, half of them more."""

    costs: CostModel
    spread: float


class Runs(Protocol):
    """What computes a step."""

    def run(self, plan: StepPlan) -> StepResult: ...


@dataclass(frozen=True, slots=True)
class Room:
    """The largest steps that may be tried."""

    rows: int
    tokens: int
    positions: int
    num_blocks: int
    block_size: int

    @classmethod
    def wanted(cls, rows: int, tokens: int, positions: int, block_size: int) -> Room:
        """With blocks for all that is tried."""
        context = min(_CONTEXT, positions - 1)
        longest = min(tokens, positions)
        need = max(
            rows * _blocks(_SHORT + 1, block_size),
            min(rows, _MANY) * _blocks(context + 1, block_size),
            _blocks(longest, block_size),
            _blocks(context + min(_CHUNK, tokens), block_size),
        )
        return cls(rows, tokens, positions, need, block_size)


def _blocks(num_tokens: int, size: int) -> int:
    return -(-num_tokens // size)


def calibrate(
    runner: Runs,
    room: Room,
    windows: tuple[int | None, ...] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> Calibration:
    """Time steps of growing size: the median of some repeats, and of two such the smaller."""
    trial = _Trial(runner, room, clock)
    trial.prompt(min(16, room.tokens), 0)  # kernels are made for what comes first
    all_rows: dict[int, list[float]] = {}
    all_tokens: dict[int, list[float]] = {}
    for _ in range(_PASSES):
        trial.table(all_rows, _ROWS, room.rows, lambda size: trial.rows(size, trial.short))
        trial.table(all_tokens, _TOKENS, trial.longest, lambda size: trial.prompt(size, 0))
    rows = {size: min(taken) for size, taken in all_rows.items()}
    tokens = {size: min(taken) for size, taken in all_tokens.items()}
    one_kv, many_kv = trial.kv_seconds(1), trial.kv_seconds(min(_MANY, room.rows))
    pair = trial.pair_seconds()
    net_rows = {
        size: seconds - size * trial.short * (one_kv if size == 1 else many_kv)
        for size, seconds in rows.items()
    }
    net_tokens = {size: seconds - pair * size * (size + 1) / 2 for size, seconds in tokens.items()}
    plain = StepCosts(_positive(net_tokens))
    chosen = [
        (seconds - plain.of(size)) / size for size, seconds in net_rows.items() if size in tokens
    ]
    costs = CostModel(
        plain,
        StepCosts(_positive(net_rows)),
        max(0.0, median(chosen)),
        one_kv,
        many_kv,
        pair,
        *_deciding(min(room.rows, 64)),
        windows if any(windows) else (),
    )
    return Calibration(costs, _spread([*all_rows.values(), *all_tokens.values()]))


def _spread(passes: Iterable[list[float]]) -> float:
    """Of sizes that came twice: half of them are further apart."""
    apart = [max(taken) / min(taken) - 1 for taken in passes if len(taken) > 1 and min(taken) > 0]
    return median(apart) if apart else 0.0


def _positive(points: dict[int, float]) -> dict[int, float]:
    """Two points or more, none of them below nothing."""
    found = {size: max(0.0, seconds) for size, seconds in points.items()}
    if len(found) == 1:
        size, seconds = next(iter(found.items()))
        found[2 * size] = 2 * seconds
    return found


def _deciding(num_rows: int) -> tuple[float, float]:
    """The scheduler's seconds for a step, and for each row."""
    few, many = (
        measure_scheduler(count, steps=40)["step_ms"] / 1e3 for count in (1, max(2, num_rows))
    )
    each = max(0.0, (many - few) / (max(2, num_rows) - 1))
    return max(0.0, few - each), each


class _Trial:
    """Runs steps and times them."""

    def __init__(self, runner: Runs, room: Room, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._room = room
        self._clock = clock
        self.short = min(_SHORT, room.positions - 1)
        self.longest = min(room.tokens, room.positions)
        self._context = min(_CONTEXT, room.positions - 1)

    def table(
        self,
        found: dict[int, list[float]],
        sizes: tuple[int, ...],
        most: int,
        seconds: Callable[[int], float],
    ) -> None:
        """One time more of each size, until the largest or until it takes too long."""
        began = self._clock()
        for size in sorted({*(size for size in sizes if size < most), most}):
            taken = found.setdefault(size, [])
            taken.append(seconds(size))
            too_long = min(taken) > _LONGEST_S or self._clock() - began > _ENOUGH_S
            if len(found) > 1 and too_long:
                break

    def rows(self, count: int, context: int) -> float:
        """Seconds of so many rows that choose the next token after so much context."""
        return self._time([(context - 1, 1, True)] * count)

    def prompt(self, num_tokens: int, start: int) -> float:
        return self._time([(start, num_tokens, False)])

    def kv_seconds(self, count: int) -> float:
        """What a token of context costs, of so many rows."""
        if self._context <= self.short:
            return 0.0
        far, near = (
            min(self.rows(count, length) for _ in range(_PASSES))
            for length in (self._context, self.short)
        )
        return max(0.0, (far - near) / (count * (self._context - self.short)))

    def pair_seconds(self) -> float:
        """What a token of a prompt pays for a token before it."""
        count = min(_CHUNK, self.longest)
        start = min(self._context, self._room.positions - count)
        if start < 1:
            return 0.0
        far, near = (min(self.prompt(count, at) for _ in range(_PASSES)) for at in (start, 0))
        return max(0.0, (far - near) / (count * start))

    def _time(self, shapes: list[tuple[int, int, bool]]) -> float:
        """The median of some runs of rows (start, tokens, sample)."""
        plan = self._plan(shapes)
        self._runner.run(plan)
        again = StepPlan([row._replace(blocks=()) for row in plan.rows])
        taken: list[float] = []
        while len(taken) < _REPEATS and sum(taken) < _REPEATS_S:
            started = self._clock()
            self._runner.run(again)
            taken.append(self._clock() - started)
        return median(taken)

    def _plan(self, shapes: list[tuple[int, int, bool]]) -> StepPlan:
        wish, size = SamplingParams(temperature=0.0), self._room.block_size
        rows, admitted, used = [], [], 0
        for i, (start, count, sample) in enumerate(shapes):
            need = _blocks(start + count, size)
            blocks = tuple(BlockId(block) for block in range(used, used + need))
            used += need
            slot, name = SlotId(i), str(i)
            known = [0] * (start + count)
            num_prompt = start if sample else len(known)
            admitted.append(SlotInit(name, slot, known, num_prompt, wish, frozenset(), 0))
            rows.append(Row(name, slot, start, count, (0,) * count, blocks, sample))
        return StepPlan(rows, admitted, freed=[row.slot for row in rows])
