"""Buffers of the captured verification step, and pre-launching the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from windlass.core.types import Row, RowResult, SlotId, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class VerifyOutputs:
    """Device outputs of a verification graph."""

    logits: Tensor
    back: Tensor  # [size, width + 1 + drafts]: samples, accepted count, next draft tokens


@dataclass(frozen=True, slots=True)
class LaunchedVerification:
    """A verification in flight."""

    logits: Tensor
    brought: Tensor
    arrived: torch.cuda.Event
    width: int
    drafting: int  # draft tokens per row for the next step
    positions_per_row: int  # positions with logits


# Samples rows again on the host whose sampling params the kernels do not support.
Resample = Callable[[Sequence[Row], list[RowResult], LaunchedVerification], list[RowResult]]


class CapturedVerification:
    """Owns a graph and its pinned host buffers: one for inputs, two for outputs in flight."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        input_buffer: Tensor,
        found: VerifyOutputs,
        shape: tuple[int, int, int],
    ) -> None:
        """`shape`: row width, draft tokens for the next step, and logits positions per row."""
        self._graph = graph
        self._input_buffer = input_buffer
        self._shape = shape
        self._back = found.back
        self.logits = found.logits
        self._sent = torch.empty(input_buffer.shape, dtype=torch.int32, pin_memory=True)
        self._brought = [torch.empty_like(found.back, device="cpu").pin_memory() for _ in "ab"]
        self._arrived = [torch.cuda.Event() for _ in "ab"]
        self._turn = 0

    def send(self, rows: list[Row], padding_row: list[int]) -> None:
        """Stage the rows, padded with `padding_row`. The graph has read the previous inputs already."""
        lines = self._sent.numpy()
        for i, row in enumerate(rows):
            count = row.num_tokens
            lines[i, : 3 + count] = (row.slot, row.start, count, *(row.tokens or (-1,)))
        lines[len(rows) :] = padding_row
        self._input_buffer.copy_(self._sent, non_blocking=True)

    def launch(self) -> LaunchedVerification:
        """Replay the graph on its input buffer."""
        self._turn ^= 1
        brought, arrived = self._brought[self._turn], self._arrived[self._turn]
        self._graph.replay()
        brought.copy_(self._back, non_blocking=True)
        arrived.record()
        return LaunchedVerification(self.logits, brought, arrived, *self._shape)


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


class PendingVerification:
    """A verification whose results are being copied to the host."""

    def __init__(
        self,
        resample: Resample,
        rows: list[Row],
        launched: LaunchedVerification,
        whole: bool = True,
    ) -> None:
        """`whole`: no row was launched with more draft tokens than the plan verifies."""
        self.rows = rows
        self.whole = whole
        self.following: list[ExpectedRow] = []  # rows of the next step; known after `wait`
        self.prelaunched = False  # whether the next step was launched, too
        self._resample = resample
        self.launched = launched

    def wait(self) -> StepResult:
        self.launched.arrived.synchronize()
        width, results = self.launched.width, []
        for row, found in zip(self.rows, self.launched.brought.tolist(), strict=False):
            sampled_tokens = found[: row.num_tokens]
            target_tokens = tuple(sampled_tokens) if row.num_drafts else ()
            kept, drafts = sampled_tokens[: found[width]], tuple(found[width + 1 :])
            if (
                found[width] > row.num_tokens
            ):  # drafted after a token that the plan no longer verifies
                drafts = ()
            self.following.append(ExpectedRow(row.slot, row.start + len(kept), (kept[-1], *drafts)))
            results.append(RowResult(kept, drafts=drafts, target_tokens=target_tokens))
        rows = self._resample(self.rows, results, self.launched)
        return StepResult(rows, prelaunched=self.prelaunched)


class PendingMixedStep:
    """A mixed step whose tokens and first draft tokens are being copied to the host."""

    def __init__(self, rows: list[Row], found: Tensor) -> None:
        """`found`: [sampled rows and padding, 1 + drafts]."""
        self._rows = rows
        count = sum(row.sample for row in rows)
        self._brought = torch.empty((count, found.shape[1]), dtype=torch.int32, pin_memory=True)
        self._brought.copy_(found[:count], non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def wait(self) -> StepResult:
        self._arrived.synchronize()
        found = iter(self._brought.tolist())
        return StepResult(
            [self._result(next(found)) if row.sample else RowResult([]) for row in self._rows]
        )

    @staticmethod
    def _result(found: list[int]) -> RowResult:
        token, *drafts = found
        return RowResult([token], drafts=tuple(drafts))
