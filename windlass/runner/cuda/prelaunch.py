"""Pre-launching the next verification, and the verification in flight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from windlass.core.types import Row, RowResult, SlotId, StepPlan, StepResult
from windlass.runner.cuda.graphs import HostCopy
from windlass.runner.inputs import StepInputs


@dataclass(frozen=True, slots=True)
class LaunchedVerification:
    """A verification in flight."""

    logits: Tensor
    back: HostCopy  # [size, width + 1 + drafts]: samples, accepted count, next draft tokens
    width: int
    draft_length: int  # draft tokens per row for the next step
    positions_per_row: int  # positions with logits


class ExpectedRow(NamedTuple):
    """The row of a pre-launched step: the last sampled token and its draft tokens."""

    slot: SlotId
    start: int
    tokens: tuple[int, ...]

    def covers(self, row: Row) -> bool:
        """Whether the pre-launched row computes this planned row, which may verify fewer drafts."""
        if row.num_tokens != 1 + row.num_drafts or not row.sample:
            return False
        same = row.slot == self.slot and row.start == self.start
        return same and row.tokens == self.tokens[: row.num_tokens]


@dataclass(frozen=True, slots=True)
class Prelaunched:
    """A verification that was launched before it was planned."""

    following: list[ExpectedRow]  # its rows; filled in when the step before has arrived
    launched: LaunchedVerification
    num_drafts: int  # per row

    def is_for(self, plan: StepPlan) -> bool:
        """Whether the plan equals the pre-launched step."""
        if plan.freed or plan.admitted or plan.copies or plan.adapters:
            return False
        if len(plan.rows) != len(self.following):
            return False
        pairs = zip(self.following, plan.rows, strict=True)
        return all(expected.covers(row) for expected, row in pairs)


# Samples special rows again: (inputs, results, verification) -> results.
Resample = Callable[[StepInputs, list[RowResult], LaunchedVerification], list[RowResult]]


class PendingVerification:
    """A verification whose results are being copied to the host."""

    def __init__(
        self,
        inputs: StepInputs,
        launched: LaunchedVerification,
        resample: Resample,
        whole: bool = True,
    ) -> None:
        """`whole`: no row was launched with more draft tokens than the plan verifies."""
        self.inputs = inputs
        self.launched = launched
        self.whole = whole
        self.following: list[ExpectedRow] = []  # rows of the next step; known after `wait`
        self.prelaunched = False  # whether the next step was launched, too
        self._resample = resample

    def wait(self) -> StepResult:
        width, results = self.launched.width, []
        found = self.launched.back.wait().tolist()
        for row, values in zip(self.inputs.rows, found, strict=False):
            sampled, num_kept = values[: row.num_tokens], values[width]
            kept, drafts = sampled[:num_kept], tuple(values[width + 1 :])
            if num_kept > row.num_tokens:  # drafted after a token that the plan no longer verifies
                drafts = ()
            self.following.append(ExpectedRow(row.slot, row.start + len(kept), (kept[-1], *drafts)))
            target_tokens = tuple(sampled) if row.num_drafts else ()
            results.append(RowResult(kept, drafts=drafts, target_tokens=target_tokens))
        results = self._resample(self.inputs, results, self.launched)
        return self.inputs.result(results, self.prelaunched)
