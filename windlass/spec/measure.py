"""What steps cost here, found out by running some before there is any request."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from windlass.core.sampling import SamplingParams
from windlass.core.types import Admission, BlockId, Row, SlotId, StepPlan
from windlass.spec.base import Proposer, Seen
from windlass.spec.governor import StepCosts
from windlass.spec.speculation import Submits

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


@dataclass(frozen=True, slots=True)
class Costs:
    """Of steps with guesses, or after which some are made, and of plain ones."""

    guessed: StepCosts
    plain: StepCosts

    def describe(self) -> str:
        """For the start-up table."""
        return f"{self.guessed.describe()}; 1 without: {1000 * self.plain.of(1):.2f} ms"


def measure(
    runner: Submits,
    proposer: Proposer,
    room: Room,
    clock: Callable[[], float] = time.perf_counter,
) -> Costs:
    """Run steps of growing size, each a few times, and keep the best times.

    Writes to the first KV blocks and uses the first slots: nobody has them yet.
    """
    alone = replace(room, row_tokens=1)
    return Costs(
        _measure(_WithGuesses(runner, proposer, wanted=True), room, clock),
        _measure(_WithGuesses(runner, proposer, wanted=False), alone, clock),
    )


@dataclass(frozen=True, slots=True)
class _WithGuesses:
    """A step and what is guessed after it."""

    runner: Submits
    proposer: Proposer
    wanted: bool

    def __call__(self, plan: StepPlan) -> None:
        self.proposer.begin(plan, self.wanted)
        results = self.runner.submit(plan).wait().rows
        slots = [row.slot for row in plan.rows]
        self.proposer.take_in(
            [
                Seen(slot, result.tokens, result.drafts)
                for slot, result in zip(slots, results, strict=True)
            ]
        )
        if self.wanted:
            self.proposer.propose(slots)


def _measure(step: Callable[[StepPlan], None], room: Room, clock: Callable[[], float]) -> StepCosts:
    began = clock()
    seconds: dict[int, float] = {}
    step(_plan(1, room))
    for size in _SIZES:
        if size > room.most or (len(seconds) > 1 and clock() - began > _ENOUGH_S):
            break
        times = []
        for _ in range(_REPEATS):
            plan = _plan(size, room)
            start = clock()
            step(plan)
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
    return StepPlan(rows, admitted, freed=[row.slot for row in rows])
