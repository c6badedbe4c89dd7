"""Measures what steps and drafting cost here, before there is any request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from windlass.core.sampling import SamplingParams
from windlass.core.types import BlockId, Row, RowResult, SlotId, SlotInit, StepPlan
from windlass.speculative.base import Draft, Proposer, Seen, seen, tell
from windlass.speculative.costs import Drafting, StepCosts
from windlass.speculative.speculation import Submits

Clock = Callable[[], float]
# Runs a step of so many tokens, or rows, once, and returns the seconds that are measured of it.
Step = Callable[[int], float]

# In the order in which they are measured: first far, then close, since a line between two sizes errs
# less than one beyond the last. GEMMs may take rows by fours and eights, so the ninth costs more.
_SIZES = (1, 2, 4, 8, 16, 9, 5, 3, 6, 32, 12, 64, 24, 128, 10, 48, 256, 96, 192)
_FEW_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_REPEATS = 4
_DRAFTS = 3  # verifications of a row, each with drafts after it
_IN_FLIGHT = 3
_PROMPT = 64  # tokens
# Time limits of verifications and of plain steps, of each draft length, and of all draft lengths
# between the first and the last. What does not fit is interpolated.
_ENOUGH_S, _ENOUGH_EACH_S, _ENOUGH_BETWEEN_S = 1.0, 0.2, 0.6


@dataclass(frozen=True, slots=True)
class Room:
    """The largest step that may be tried."""

    positions: int
    rows: int
    row_tokens: int
    num_blocks: int
    block_size: int
    max_model_len: int = 2**31
    ahead: int = 0  # tokens after a row's own that have room in its blocks

    @property
    def depth(self) -> int:
        """Most draft tokens of a row of which there is room for a few verifications."""
        longest = min(self.max_model_len, self.num_blocks * self.block_size)
        return min(self.row_tokens - 1, (longest - 1 - _DRAFTS) // (1 + _DRAFTS))

    @property
    def row_blocks(self) -> int:
        return -(-(self.row_tokens + self.ahead) // self.block_size)

    @property
    def most(self) -> int:
        rows = min(self.rows, self.num_blocks // self.row_blocks)
        return min(self.positions, max(1, rows) * self.row_tokens)

    def one_each(self, ahead: int) -> Room:
        """For rows of one token, with room for `ahead` tokens after it."""
        return replace(self, row_tokens=1, ahead=ahead)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of verifications, of plain steps, and of drafting; None: drafting is free."""

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
        found: dict[str, Any] = {
            "guessed": self.guessed.points,
            "plain": self.plain.points,
            "drafting": None,
        }
        if self.drafting is not None:
            by_depth = {depth: each.points for depth, each in self.drafting.by_depth.items()}
            found["drafting"] = by_depth
            found["prompt_token_s"] = self.drafting.prompt_token_s
        return found

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Costs:
        """What `to_json` gave; anything else raises KeyError, TypeError or ValueError."""
        drafting = None
        if found["drafting"] is not None:
            by_depth = {int(at): _points(each) for at, each in found["drafting"].items()}
            if len(by_depth) < 2:
                raise ValueError("fewer than two draft lengths")
            drafting = Drafting(by_depth, float(found["prompt_token_s"]))
        return cls(_points(found["guessed"]), _points(found["plain"]), drafting)


def _points(found: dict[str, float]) -> StepCosts:
    if len(found) < 2:
        raise ValueError("fewer than two sizes")
    return StepCosts({int(size): float(seconds) for size, seconds in found.items()})


def measure(
    runner: Submits,
    proposer: Proposer,
    room: Room,
    clock: Clock = time.perf_counter,
) -> Costs:
    """Run steps of growing size, each a few times, and keep the best times.

    Writes to the first KV blocks and uses the first slots: nobody has them yet.
    """
    trial = _Trial(runner, proposer, room, clock)
    guessed = _table(trial.verification, _SIZES, room.most, clock)
    plain = _table(trial.plain, _SIZES, room.one_each(ahead=0).most, clock)
    if proposer.free or room.depth < 1:
        return Costs(guessed, plain)
    return Costs(guessed, plain, _drafting(trial))


def spot_check(
    runner: Submits,
    proposer: Proposer,
    room: Room,
    clock: Clock = time.perf_counter,
) -> SpotCheck:
    """Measure one plain step, and the longest draft of one row where drafting is not free."""
    trial = _Trial(runner, proposer, room, clock)
    plain = min(trial.plain(1) for _ in range(_REPEATS))
    if proposer.free or room.depth < 1:
        return SpotCheck(plain)
    return SpotCheck(plain, room.depth, _drafting_seconds(trial, room.depth, (1,)).of(1))


@dataclass(frozen=True, slots=True)
class SpotCheck:
    """Seconds of a plain step of one row, and of drafting `depth` tokens for it."""

    plain_s: float
    depth: int = 0
    draft_s: float = 0.0

    def disagreement(self, costs: Costs) -> float:
        """The largest factor between these seconds and a table's; 1: they agree."""
        pairs = [(self.plain_s, costs.plain.of(1))]
        if costs.drafting is not None and self.depth:
            # With the step: drafting alone may take next to nothing, where no factor means much.
            known = costs.drafting.of(1, self.depth)
            pairs.append((self.plain_s + self.draft_s, costs.plain.of(1) + known))
        return max(max(now / noted, noted / now) for now, noted in pairs)


# ---- tables ------------------------------------------------------------------------------------


def _drafting(trial: _Trial) -> Drafting:
    """One draft token and the most, then lengths in between while there is time."""
    deep = trial.room.depth
    by_depth = {depth: _drafting_seconds(trial, depth) for depth in sorted({1, deep})}
    end = trial.clock() + _ENOUGH_BETWEEN_S
    for depth in range(2, deep):
        if trial.clock() > end:
            break
        by_depth[depth] = _drafting_seconds(trial, depth)
    if deep == 1:
        points = by_depth[1].points.items()
        by_depth[2] = StepCosts({rows: 2 * seconds for rows, seconds in points})
    return Drafting(by_depth, _prompt_token_s(trial, by_depth[1].of(1)))


def _prompt_token_s(trial: _Trial, first_s: float) -> float:
    """Seconds per prompt token that a draft model computes before its first draft token."""
    room = trial.room
    count = min(_PROMPT, room.max_model_len - 2, room.num_blocks * room.block_size - 2)
    if trial.proposer.in_step or count < 2:
        return 0.0
    # Other tokens each time: a prefix that the pages hold is not computed again.
    seconds = min(trial.prompt(count, token) for token in range(1, 1 + _REPEATS))
    return max(0.0, seconds - first_s) / count


def _drafting_seconds(trial: _Trial, depth: int, sizes: Sequence[int] = _FEW_SIZES) -> StepCosts:
    """Seconds of drafting `depth` tokens, by rows."""
    most = min(trial.draft_room(depth).most, max(1, trial.room.positions // (1 + depth)))
    sizes = [size for size in sizes if size <= most]
    if trial.proposer.in_step:
        limits = (sizes, most, trial.clock, _ENOUGH_EACH_S)
        bare = _table(lambda rows: trial.decode(rows, 0), *limits)
        points = _table(lambda rows: trial.decode(rows, depth), *limits).points.items()
        return StepCosts({rows: max(0.0, seconds - bare.of(rows)) for rows, seconds in points})
    seconds: dict[int, float] = {}
    end = trial.clock() + _ENOUGH_EACH_S
    for rows in sizes:
        seconds[rows] = trial.drafting(rows, depth)
        if trial.clock() > end:
            break
    if len(seconds) == 1:
        seconds[2] = 2 * seconds[1]
    return StepCosts(seconds)


def _table(
    step: Step, sizes: Iterable[int], most: int, clock: Clock, enough_s: float = _ENOUGH_S
) -> StepCosts:
    """The best times by size, at least of the first two sizes."""
    began = clock()
    seconds: dict[int, float] = {}
    step(1)  # what is allocated or compiled by the first is no part of the others
    for size in (each for each in sizes if each <= most):
        if len(seconds) > 1 and clock() - began > enough_s:
            break
        seconds[size] = min(step(size) for _ in range(_REPEATS))
    if len(seconds) == 1:  # no room for a second row or token either
        seconds[2] = 2 * seconds[1]
    return StepCosts(seconds)


# ---- steps -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Trial:
    """Runs steps like those of requests, and returns the seconds that matter."""

    runner: Submits
    proposer: Proposer
    room: Room
    clock: Clock

    def verification(self, size: int) -> float:
        """A verification of `size` tokens in rows that are as long as they may be."""
        plan = _plan(size, self.room)
        self._run(plan)
        again = _again(plan)
        start = self.clock()
        self._run(again)
        return self.clock() - start

    def plain(self, size: int) -> float:
        """A step without drafts, launched while the one before is in flight."""
        plan = _plan(size, self.room.one_each(ahead=0))
        tell(self.proposer, plan)
        self.proposer.begin(0)
        self.runner.submit(plan).wait()
        again = _again(plan)
        start = self.clock()
        for pending in [self.runner.submit(again) for _ in range(_IN_FLIGHT)]:
            pending.wait()
        return (self.clock() - start) / _IN_FLIGHT

    def decode(self, num_rows: int, depth: int) -> float:
        """A step of one token a row, the second of its request, and drafting in it or after it."""
        room = self.draft_room(depth)
        plan = _plan(num_rows, room)
        self._draft(plan, depth)
        following = _following(plan, room) or _again(plan)
        start = self.clock()
        self._draft(following, depth)
        return self.clock() - start

    def drafting(self, num_rows: int, depth: int) -> float:
        """Drafting alone, after verifications in which every draft token was accepted.

        The proposer first catches up on these tokens, as it does in a request.
        """
        plan = _plan(num_rows, self.draft_room(depth))
        drafts, best = self._draft(plan, depth), inf
        for _ in range(_DRAFTS):
            plan = _verification(plan, drafts)
            self.proposer.begin(depth)
            results = self.runner.submit(plan).wait().rows
            accepted = [
                Seen(row.slot, [*row.tokens[1:], result.tokens[-1]])
                for row, result in zip(plan.rows, results, strict=True)
            ]
            start = self.clock()
            self.proposer.take_in(accepted)
            drafts = self.proposer.propose([row.slot for row in plan.rows])
            best = min(best, self.clock() - start)
        return best

    def prompt(self, num_tokens: int, token: int) -> float:
        """The first draft token of a request of which the proposer knows no token."""
        plan = _plan(1, self.room.one_each(ahead=num_tokens))
        tell(self.proposer, plan)
        self.proposer.begin(1)
        self.runner.submit(plan).wait()
        (slot,) = (row.slot for row in plan.rows)
        start = self.clock()
        self.proposer.take_in([Seen(slot, [token] * num_tokens)])
        if not self.proposer.backlog(slot, 1 + num_tokens):
            return 0.0
        self.proposer.propose([slot])
        return self.clock() - start

    def draft_room(self, depth: int) -> Room:
        """For a token, a few verifications and the drafts after the last."""
        return self.room.one_each(ahead=_DRAFTS * (1 + depth) + depth)

    def _run(self, plan: StepPlan) -> list[RowResult]:
        tell(self.proposer, plan)
        self.proposer.begin(0)
        results = self.runner.submit(plan).wait().rows
        self.proposer.take_in([seen(*pair) for pair in zip(plan.rows, results, strict=True)])
        return results

    def _draft(self, plan: StepPlan, depth: int) -> list[Draft]:
        tell(self.proposer, plan)
        self.proposer.begin(depth)
        results = self.runner.submit(plan).wait().rows
        self.proposer.take_in([seen(*pair) for pair in zip(plan.rows, results, strict=True)])
        return self.proposer.propose([row.slot for row in plan.rows]) if depth else []


# ---- plans -------------------------------------------------------------------------------------


def _again(plan: StepPlan) -> StepPlan:
    """The same rows once more, with nobody new."""
    return StepPlan([row._replace(blocks=()) for row in plan.rows])


def _following(plan: StepPlan, room: Room) -> StepPlan | None:
    """The next token of the same rows, where the blocks have room."""
    if any(len(row.blocks) * room.block_size < 3 for row in plan.rows):
        return None
    return StepPlan([row._replace(start=1, blocks=()) for row in plan.rows])


def _verification(plan: StepPlan, drafts: Sequence[Draft]) -> StepPlan:
    """The drafts after each row's token."""
    rows = []
    for row, draft in zip(plan.rows, drafts, strict=True):
        count = len(draft.tokens)
        rows.append(
            row._replace(
                start=row.start + row.num_tokens,
                num_tokens=1 + count,
                tokens=(0, *draft.tokens),
                blocks=(),
                num_drafts=count,
            )
        )
    return StepPlan(rows)


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
        admitted.append(SlotInit(name, slot, [0], 0, wish, frozenset(), 0))
        rows.append(Row(name, slot, 0, count, (0,) * count, blocks, True, count - 1))
    return StepPlan(rows, admitted, freed=[row.slot for row in rows])
