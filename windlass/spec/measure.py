"""What steps and guesses cost here, found out by running some before there is any request."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from windlass.core.sampling import SamplingParams
from windlass.core.types import Admission, BlockId, Row, SlotId, StepPlan
from windlass.spec.base import Proposer, seen, tell
from windlass.spec.governor import Drafting, StepCosts
from windlass.spec.speculation import Submits

# In the order in which they are tried: first far, then close, since a line between two sizes errs less
# than one beyond the last. Products may take rows by fours and eights, so the ninth costs more.
_SIZES = (1, 2, 4, 8, 16, 9, 5, 3, 6, 32, 12, 64, 24, 128, 10, 48, 256, 96, 192)
_FEW_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_REPEATS = 4
_IN_FLIGHT = 3
# For steps with guesses and for plain ones, and for each way of making guesses: sizes that there was
# no time for are taken to cost as the others suggest.
_ENOUGH_S, _ENOUGH_EACH_S = 1.0, 0.2


@dataclass(frozen=True, slots=True)
class Room:
    """The largest step that may be tried."""

    positions: int
    rows: int
    row_tokens: int
    num_blocks: int
    block_size: int
    ahead: int = 0  # tokens after a row's own that have room in its blocks

    @property
    def row_blocks(self) -> int:
        return -(-(self.row_tokens + self.ahead) // self.block_size)

    @property
    def most(self) -> int:
        rows = min(self.rows, self.num_blocks // self.row_blocks)
        return min(self.positions, max(1, rows) * self.row_tokens)

    @property
    def one_each(self) -> Room:
        """For rows of one token, and guesses after it."""
        return replace(self, row_tokens=1, ahead=self.row_tokens + 1)


@dataclass(frozen=True, slots=True)
class Costs:
    """Of steps that carry guesses, of plain ones, and of making guesses; None: that is free."""

    guessed: StepCosts
    plain: StepCosts
    drafting: Drafting | None = None

    def describe(self) -> str:
        """For the start-up table."""
        parts = [self.guessed.describe(), f"1 without: {1000 * self.plain.of(1):.2f} ms"]
        if self.drafting is not None:
            parts.append(self.drafting.describe())
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        made = self.drafting
        drafting = made and [made.one.points, made.many.points, made.depth]
        return {"guessed": self.guessed.points, "plain": self.plain.points, "drafting": drafting}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Costs:
        """What `to_json` gave; anything else raises KeyError, TypeError or ValueError."""
        drafting = None
        if found["drafting"] is not None:
            one, many, depth = found["drafting"]
            drafting = Drafting(_points(one), _points(many), int(depth))
        return cls(_points(found["guessed"]), _points(found["plain"]), drafting)


def _points(found: dict[str, float]) -> StepCosts:
    if len(found) < 2:
        raise ValueError("fewer than two sizes")
    return StepCosts({int(size): float(seconds) for size, seconds in found.items()})


def measure(
    runner: Submits,
    proposer: Proposer,
    room: Room,
    clock: Callable[[], float] = time.perf_counter,
) -> Costs:
    """Run steps of growing size, each a few times, and keep the best times.

    Writes to the first KV blocks and uses the first slots: nobody has them yet.
    """
    alone, depth = room.one_each, room.row_tokens - 1

    def of(wanted: int, room: Room, sizes: tuple[int, ...], enough: float) -> StepCosts:
        return _measure(_WithGuesses(runner, proposer, wanted), room, sizes, clock, enough)

    guessed = of(0, room, _SIZES, _ENOUGH_S)
    plain = _plainly(runner, proposer, alone, _SIZES, clock)
    if proposer.free or depth < 1:
        return Costs(guessed, plain)
    deep = max(2, depth)
    bare, one, many = (of(count, alone, _FEW_SIZES, _ENOUGH_EACH_S) for count in (0, 1, deep))
    return Costs(guessed, plain, Drafting(_over(one, bare), _over(many, bare), deep))


def plain_step(
    runner: Submits,
    proposer: Proposer,
    room: Room,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds of a step of one token."""
    return _plainly(runner, proposer, room.one_each, (1,), clock).of(1)


def _over(costs: StepCosts, bare: StepCosts) -> StepCosts:
    """What these steps cost more than bare ones."""
    points = costs.points.items()
    return StepCosts({size: max(0.0, seconds - bare.of(size)) for size, seconds in points})


@dataclass(frozen=True, slots=True)
class _WithGuesses:
    """A step and what is guessed after it."""

    runner: Submits
    proposer: Proposer
    wanted: int

    def __call__(self, size: int, room: Room, clock: Callable[[], float]) -> float:
        """Seconds of a step whose slots are known; of rows of one token, of the next after it."""
        plan = _plan(size, room)
        self._run(plan)
        again = _following(plan, room) or _again(plan)
        start = clock()
        self._run(again)
        return clock() - start

    def _run(self, plan: StepPlan) -> None:
        tell(self.proposer, plan)
        self.proposer.begin(self.wanted)
        results = self.runner.submit(plan).wait().rows
        self.proposer.take_in([seen(*pair) for pair in zip(plan.rows, results, strict=True)])
        if self.wanted:
            self.proposer.propose([row.slot for row in plan.rows])


def _measure(
    step: Callable[[int, Room, Callable[[], float]], float],
    room: Room,
    sizes: tuple[int, ...],
    clock: Callable[[], float],
    enough: float = _ENOUGH_S,
) -> StepCosts:
    began = clock()
    seconds: dict[int, float] = {}
    step(1, room, clock)
    for size in (one for one in sizes if one <= room.most):
        if len(seconds) > 1 and clock() - began > enough:
            break
        seconds[size] = min(step(size, room, clock) for _ in range(_REPEATS))
    if len(seconds) == 1:  # there is no room for a guess either
        seconds[2] = 2 * seconds[1]
    return StepCosts(seconds)


def _plainly(
    runner: Submits,
    proposer: Proposer,
    room: Room,
    sizes: tuple[int, ...],
    clock: Callable[[], float],
) -> StepCosts:
    """Steps without guesses, which are launched while the one before is on its way."""

    def step(size: int, room: Room, clock: Callable[[], float]) -> float:
        plan = _plan(size, room)
        tell(proposer, plan)
        proposer.begin(0)
        runner.submit(plan).wait()
        again = _again(plan)
        start = clock()
        for pending in [runner.submit(again) for _ in range(_IN_FLIGHT)]:
            pending.wait()
        return (clock() - start) / _IN_FLIGHT

    return _measure(step, room, sizes, clock)


def _again(plan: StepPlan) -> StepPlan:
    """The same once more, with nobody new."""
    return StepPlan([row._replace(blocks=()) for row in plan.rows])


def _following(plan: StepPlan, room: Room) -> StepPlan | None:
    """The next token of the same rows, where they are of one and the blocks have room."""
    if room.row_tokens > 1 or any(len(row.blocks) * room.block_size < 3 for row in plan.rows):
        return None
    return StepPlan([row._replace(start=1, blocks=()) for row in plan.rows])


def _plan(num_tokens: int, room: Room) -> StepPlan:
    """A verification of so many tokens, in rows as long as they may be."""
    wish = SamplingParams(temperature=0.0)
    rows, admitted = [], []
    for i, first in enumerate(range(0, num_tokens, room.row_tokens)):
        count = min(room.row_tokens, num_tokens - first)
        slot, name = SlotId(i), str(i)
        held = range(i * room.row_blocks, (i + 1) * room.row_blocks)
        blocks = tuple(BlockId(block) for block in held if block < room.num_blocks)
        # With no prompt: its tokens may be computed otherwise than those that follow.
        admitted.append(Admission(name, slot, [0], 0, wish, frozenset(), 0))
        rows.append(Row(name, slot, 0, count, (0,) * count, blocks, True, count - 1))
    return StepPlan(rows, admitted, freed=[row.slot for row in rows])
