"""Measures the costs of steps and drafting on this machine, before there is any request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from windlass.core.speculation.costs import Costs, DraftCosts, StepCosts
from windlass.core.types import (
    Draft,
    Row,
    RowResult,
    SlotId,
    SlotInit,
    StepOptions,
    StepPlan,
)
from windlass.speculative.base import Proposer, SlotUpdate, Submits, apply_plan, slot_update

Clock = Callable[[], float]
# Runs one step of a number of tokens, or rows, and returns its measured seconds.
Step = Callable[[int], float]

# In the order of measurement: the largest sizes early, since interpolation errs less than
# extrapolation. GEMMs may process rows in tiles of four and eight, so the ninth row costs more.
_SIZES = (1, 2, 4, 8, 16, 9, 5, 3, 6, 32, 12, 64, 24, 128, 10, 48, 256, 96, 192)
_FEW_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_REPEATS = 4
_NUM_VERIFICATIONS = 3  # of a row, each followed by drafting
_IN_FLIGHT = 3
_PROMPT = 64  # tokens
# Time limits: of the tables of verifications and plain steps, of each draft length, and of all draft
# lengths between the first and the last. The rest is interpolated.
_TABLE_S, _LENGTH_S, _BETWEEN_S = 1.0, 0.2, 0.6


@dataclass(frozen=True, slots=True)
class MeasureLimits:
    """The largest step to measure."""

    max_positions: int
    max_rows: int
    max_row_tokens: int
    num_blocks: int
    block_size: int
    max_model_len: int = 2**31
    lookahead: int = 0  # tokens behind a row's last one that its blocks have room for

    @property
    def max_draft_length(self) -> int:
        """The longest draft of which a row's blocks have room for a few verifications."""
        max_tokens = min(self.max_model_len, self.num_blocks * self.block_size)
        most = (max_tokens - 1 - _NUM_VERIFICATIONS) // (1 + _NUM_VERIFICATIONS)
        return min(self.max_row_tokens - 1, most)

    @property
    def row_blocks(self) -> int:
        return -(-(self.max_row_tokens + self.lookahead) // self.block_size)

    @property
    def max_tokens(self) -> int:
        rows = min(self.max_rows, self.num_blocks // self.row_blocks)
        return min(self.max_positions, max(1, rows) * self.max_row_tokens)

    def single_tokens(self, lookahead: int) -> MeasureLimits:
        """Limits for rows of one token, with `lookahead` tokens after it."""
        return replace(self, max_row_tokens=1, lookahead=lookahead)


def measure(
    runner: Submits,
    proposer: Proposer,
    limits: MeasureLimits,
    clock: Clock = time.perf_counter,
) -> Costs:
    """Run steps of growing size, each a few times, and keep the best times.

    Writes to the first KV blocks and uses the first slots, which no request has yet.
    """
    steps = _Steps(runner=runner, proposer=proposer, limits=limits, clock=clock)
    verify = _table(steps.verification, _SIZES, limits.max_tokens, clock=clock)
    max_rows = limits.single_tokens(lookahead=0).max_tokens
    plain = _table(steps.plain, _SIZES, max_rows, clock=clock)
    if proposer.free or limits.max_draft_length < 1:
        return Costs(verify, plain)
    return Costs(verify, plain, _draft_costs(steps))


def spot_check(
    runner: Submits,
    proposer: Proposer,
    limits: MeasureLimits,
    clock: Clock = time.perf_counter,
) -> SpotCheck:
    """Measure one plain step, and the longest draft of one row where drafting is not free."""
    steps = _Steps(runner=runner, proposer=proposer, limits=limits, clock=clock)
    plain = min(steps.plain(1) for _ in range(_REPEATS))
    length = limits.max_draft_length
    if proposer.free or length < 1:
        return SpotCheck(plain)
    return SpotCheck(plain, length, _draft_seconds(steps, length, (1,)).of(1))


@dataclass(frozen=True, slots=True)
class SpotCheck:
    """Seconds of a plain step of one row, and of drafting `draft_length` tokens for it."""

    plain_s: float
    draft_length: int = 0
    draft_s: float = 0.0

    def disagreement(self, costs: Costs) -> float:
        """The largest factor between these seconds and a table's; 1: they agree."""
        pairs = [(self.plain_s, costs.plain.of(1))]
        if costs.drafting is not None and self.draft_length:
            # Compares drafting plus the step: drafting alone may take almost no time, and its ratio
            # is noise.
            known = costs.drafting.of(1, self.draft_length)
            pairs.append((self.plain_s + self.draft_s, costs.plain.of(1) + known))
        return max(max(now / cached, cached / now) for now, cached in pairs)


# ---- tables ------------------------------------------------------------------------------------


def _draft_costs(steps: _Steps) -> DraftCosts:
    """Measure drafts of one token and of the maximum, then lengths in between while there is time."""
    longest = steps.limits.max_draft_length
    by_length = {length: _draft_seconds(steps, length) for length in sorted({1, longest})}
    end = steps.clock() + _BETWEEN_S
    for length in range(2, longest):
        if steps.clock() > end:
            break
        by_length[length] = _draft_seconds(steps, length)
    if longest == 1:
        points = by_length[1].points.items()
        by_length[2] = StepCosts({rows: 2 * seconds for rows, seconds in points})
    return DraftCosts(by_length, _prompt_token_s(steps, by_length[1].of(1)))


def _prompt_token_s(steps: _Steps, first_s: float) -> float:
    """Seconds per prompt token that a draft model computes before its first draft token."""
    limits = steps.limits
    count = min(_PROMPT, limits.max_model_len - 2, limits.num_blocks * limits.block_size - 2)
    if steps.proposer.in_step or count < 2:
        return 0.0
    # New tokens each time, since the draft model would reuse a cached prefix.
    seconds = min(steps.prompt(count, token) for token in range(1, 1 + _REPEATS))
    return max(0.0, seconds - first_s) / count


def _draft_seconds(
    steps: _Steps, draft_length: int, sizes: Sequence[int] = _FEW_SIZES
) -> StepCosts:
    """Seconds of drafting `draft_length` tokens, by rows."""
    max_rows = min(
        steps.draft_limits(draft_length).max_tokens,
        max(1, steps.limits.max_positions // (1 + draft_length)),
    )
    sizes = [size for size in sizes if size <= max_rows]
    if steps.proposer.in_step:

        def table(length: int) -> StepCosts:
            return _table(
                lambda rows: steps.decode(rows, length),
                sizes,
                max_rows,
                clock=steps.clock,
                limit_s=_LENGTH_S,
            )

        bare = table(0)
        points = table(draft_length).points.items()
        return StepCosts({rows: max(0.0, seconds - bare.of(rows)) for rows, seconds in points})
    seconds: dict[int, float] = {}
    end = steps.clock() + _LENGTH_S
    for rows in sizes:
        seconds[rows] = steps.drafting(rows, draft_length)
        if steps.clock() > end:
            break
    if len(seconds) == 1:
        seconds[2] = 2 * seconds[1]
    return StepCosts(seconds)


def _table(
    step: Step, sizes: Iterable[int], max_size: int, *, clock: Clock, limit_s: float = _TABLE_S
) -> StepCosts:
    """Measure the best times by size, at least of the first two sizes."""
    began = clock()
    seconds: dict[int, float] = {}
    step(1)  # a warm-up: the first step allocates and compiles
    for size in (each for each in sizes if each <= max_size):
        if len(seconds) > 1 and clock() - began > limit_s:
            break
        seconds[size] = min(step(size) for _ in range(_REPEATS))
    if len(seconds) == 1:  # no room for a second row or token
        seconds[2] = 2 * seconds[1]
    return StepCosts(seconds)


# ---- steps -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Steps:
    """Runs steps like those of requests, and returns their seconds."""

    runner: Submits
    proposer: Proposer
    limits: MeasureLimits
    clock: Clock

    def verification(self, size: int) -> float:
        """Time a verification of `size` tokens in rows of the maximum length."""
        plan = _plan(size, self.limits)
        self._run(plan)
        again = _again(plan)
        start = self.clock()
        self._run(again)
        return self.clock() - start

    def plain(self, size: int) -> float:
        """Time a step without drafts, launched while the previous one is in flight."""
        plan = _plan(size, self.limits.single_tokens(lookahead=0))
        apply_plan(self.proposer, plan)
        self.runner.submit(plan).wait()
        again = _again(plan)
        start = self.clock()
        for pending in [self.runner.submit(again) for _ in range(_IN_FLIGHT)]:
            pending.wait()
        return (self.clock() - start) / _IN_FLIGHT

    def decode(self, num_rows: int, draft_length: int) -> float:
        """Time a decode step, the second of its requests, with drafting in it or after it."""
        limits = self.draft_limits(draft_length)
        plan = _plan(num_rows, limits)
        self._draft(plan, draft_length)
        following = _following(plan, limits) or _again(plan)
        start = self.clock()
        self._draft(following, draft_length)
        return self.clock() - start

    def drafting(self, num_rows: int, draft_length: int) -> float:
        """Time drafting alone, after verifications that accepted every draft token.

        The proposer first catches up on these tokens, as it does in a request.
        """
        plan = _plan(num_rows, self.draft_limits(draft_length))
        drafts, best = self._draft(plan, draft_length), inf
        for _ in range(_NUM_VERIFICATIONS):
            plan = _drafting(_verification(plan, drafts), draft_length)
            results = self.runner.submit(plan).wait().rows
            accepted = [
                SlotUpdate(row.slot, [*row.tokens[1:], result.tokens[-1]])
                for row, result in zip(plan.rows, results, strict=True)
            ]
            start = self.clock()
            self.proposer.update(accepted)
            drafts = self.proposer.propose([row.slot for row in plan.rows], draft_length)
            best = min(best, self.clock() - start)
        return best

    def prompt(self, num_tokens: int, token: int) -> float:
        """Time the first draft token of a request whose tokens the proposer has not computed."""
        plan = _plan(1, self.limits.single_tokens(lookahead=num_tokens))
        apply_plan(self.proposer, plan)
        self.runner.submit(plan).wait()
        (slot,) = (row.slot for row in plan.rows)
        start = self.clock()
        self.proposer.update([SlotUpdate(slot, [token] * num_tokens)])
        if not self.proposer.backlog(slot):
            return 0.0
        self.proposer.propose([slot], draft_length=1)
        return self.clock() - start

    def draft_limits(self, draft_length: int) -> MeasureLimits:
        """Limits that fit a token, a few verifications and the draft after the last."""
        lookahead = _NUM_VERIFICATIONS * (1 + draft_length) + draft_length
        return self.limits.single_tokens(lookahead=lookahead)

    def _run(self, plan: StepPlan) -> list[RowResult]:
        apply_plan(self.proposer, plan)
        results = self.runner.submit(plan).wait().rows
        self._update(plan, results)
        return results

    def _draft(self, plan: StepPlan, draft_length: int) -> list[Draft]:
        apply_plan(self.proposer, plan)
        self._update(plan, self.runner.submit(_drafting(plan, draft_length)).wait().rows)
        slots = [row.slot for row in plan.rows]
        return self.proposer.propose(slots, draft_length) if draft_length else []

    def _update(self, plan: StepPlan, results: list[RowResult]) -> None:
        pairs = zip(plan.rows, results, strict=True)
        self.proposer.update([slot_update(row, result) for row, result in pairs])


# ---- plans -------------------------------------------------------------------------------------


def _drafting(plan: StepPlan, draft_length: int) -> StepPlan:
    """The plan, with drafting in the step if the runner has a drafter."""
    return plan._replace(options=StepOptions(draft_length=draft_length))


def _again(plan: StepPlan) -> StepPlan:
    """The same rows once more, without admissions."""
    return StepPlan([row._replace(blocks=()) for row in plan.rows])


def _following(plan: StepPlan, limits: MeasureLimits) -> StepPlan | None:
    """The next token of the same rows, if it fits into their blocks."""
    if any(len(row.blocks) * limits.block_size < 3 for row in plan.rows):
        return None
    return StepPlan([row._replace(start=1, blocks=()) for row in plan.rows])


def _verification(plan: StepPlan, drafts: Sequence[Draft]) -> StepPlan:
    """A verification of the drafts after each row's token."""
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


def _plan(num_tokens: int, limits: MeasureLimits) -> StepPlan:
    """A verification of `num_tokens`, in rows of the maximum length."""
    rows, admitted = [], []
    for i, first in enumerate(range(0, num_tokens, limits.max_row_tokens)):
        count = min(limits.max_row_tokens, num_tokens - first)
        slot, end = SlotId(i), min((i + 1) * limits.row_blocks, limits.num_blocks)
        row = Row.unowned(slot, (0,) * count, blocks=range(i * limits.row_blocks, end))
        rows.append(row._replace(num_drafts=count - 1))
        # All tokens count as generated: prompt tokens may be computed by other kernels.
        admitted.append(SlotInit.greedy(slot, [0], num_prompt=0))
    return StepPlan(rows, admitted, freed=[row.slot for row in rows])
