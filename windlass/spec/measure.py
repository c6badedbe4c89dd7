"""What steps cost here, found out by running some before there is any request."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from windlass.core.sampling import SamplingParams
from windlass.core.types import Admission, BlockId, Row, SlotId, StepPlan
from windlass.spec.governor import StepCosts
from windlass.spec.speculation import Verifier

_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_REPEATS = 3
_ENOUGH_S = 0.8  # larger steps are then taken to cost as the last ones suggest


@dataclass(frozen=True, slots=True)
class Room:
    """The largest step that may be tried."""

    positions: int
    rows: int
    row_tokens: int
    num_blocks: int
    block_size: int

    @property
    def row_blocks(self) -> int:
        return -(-self.row_tokens // self.block_size)

    @property
    def most(self) -> int:
        rows = min(self.rows, self.num_blocks // self.row_blocks)
        return min(self.positions, max(1, rows) * self.row_tokens)


def measure(
    runner: Verifier, room: Room, clock: Callable[[], float] = time.perf_counter
) -> StepCosts:
    """Run steps of growing size, each a few times, and keep the best times.

    Writes to the first KV blocks and uses the first slots: nobody has them yet.
    """
    began = clock()
    seconds: dict[int, float] = {}
    runner.verify(_plan(1, room))
    for size in _SIZES:
        if size > room.most or (len(seconds) > 1 and clock() - began > _ENOUGH_S):
            break
        times = []
        for _ in range(_REPEATS):
            start = clock()
            runner.verify(_plan(size, room))
            times.append(clock() - start)
        seconds[size] = min(times)
    if len(seconds) == 1:  # there is no room for a guess either
        seconds[2] = 2 * seconds[1]
    return StepCosts(seconds)


def _plan(num_tokens: int, room: Room) -> StepPlan:
    """A verification of so many tokens, in rows as long as they may be."""
    wish = SamplingParams(temperature=0.0)
    rows, admitted = [], []
    for i, first in enumerate(range(0, num_tokens, room.row_tokens)):
        count = min(room.row_tokens, num_tokens - first)
        slot, name = SlotId(i), str(i)
        held = range(i * room.row_blocks, (i + 1) * room.row_blocks)
        blocks = tuple(BlockId(block) for block in held if block < room.num_blocks)
        admitted.append(Admission(name, slot, [0], 1, wish, frozenset(), 0))
        rows.append(Row(name, slot, 0, count, (0,) * count, blocks, True, count - 1))
    return StepPlan(rows, admitted)
