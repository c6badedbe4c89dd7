"""What a recorded verification on CUDA reads, brings back and leads to; its launches, also early ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from windlass.core.types import Row, RowResult, SlotId, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class VerifyOutputs:
    """What a verification leaves on the device."""

    logits: Tensor
    back: Tensor  # [size, width + 1 + guesses]: samples, how many are kept, and the next guesses


@dataclass(frozen=True, slots=True)
class LaunchedVerification:
    """A verification that is being computed."""

    logits: Tensor
    brought: Tensor
    arrived: torch.cuda.Event
    width: int
    drafting: int  # guesses for the next step that it makes
    places: int  # of a row, among the logits


# Draws rows anew whose wishes kernels do not know.
Resample = Callable[[Sequence[Row], list[RowResult], LaunchedVerification], list[RowResult]]


class CapturedVerification:
    """Owns a recording and its mail: pinned memory for what is sent, and for what two steps bring."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        input_buffer: Tensor,
        found: VerifyOutputs,
        shape: tuple[int, int, int],
    ) -> None:
        """`shape`: the tokens of a row, the guesses that are made for the next step, and a row's places."""
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
        """Write the rows down; those that only pad are `padding_row`. The last step's were read long ago."""
        lines = self._sent.numpy()
        for i, row in enumerate(rows):
            count = row.num_tokens
            lines[i, : 3 + count] = (row.slot, row.start, count, *(row.tokens or (-1,)))
        lines[len(rows) :] = padding_row
        self._input_buffer.copy_(self._sent, non_blocking=True)

    def launch(self) -> LaunchedVerification:
        """Compute what lies in the inbox."""
        self._turn ^= 1
        brought, arrived = self._brought[self._turn], self._arrived[self._turn]
        self._graph.replay()
        brought.copy_(self._back, non_blocking=True)
        arrived.record()
        return LaunchedVerification(self.logits, brought, arrived, *self._shape)


class ExpectedRow(NamedTuple):
    """A row of the next step, if nothing comes in between: its tokens are the last and the guesses."""

    slot: SlotId
    start: int
    tokens: tuple[int, ...]

    def covers(self, row: Row) -> bool:
        """Whether this row asks for nothing else; it may have fewer guesses."""
        if row.num_tokens != 1 + row.num_drafts or not row.sample:
            return False
        same = row.slot == self.slot and row.start == self.start
        return same and row.tokens == self.tokens[: row.num_tokens]


@dataclass(frozen=True, slots=True)
class Prelaunched:
    """A verification that was launched before it was planned."""

    following: list[ExpectedRow]  # its rows, filled in by the one before when that has arrived
    launched: LaunchedVerification
    guesses: int  # of every row

    def is_for(self, plan: StepPlan) -> bool:
        """Whether a plan asks for this and nothing else."""
        if plan.freed or plan.admitted or plan.copies or plan.adapters:
            return False
        if len(plan.rows) != len(self.following):
            return False
        pairs = zip(self.following, plan.rows, strict=True)
        return all(expected.covers(row) for expected, row in pairs)


class PendingVerification:
    """A verification whose results are travelling to the host."""

    has_drafts = True

    def __init__(
        self,
        resample: Resample,
        rows: list[Row],
        launched: LaunchedVerification,
        whole: bool = True,
    ) -> None:
        """`resample` knows what kernels do not; `whole`: no row was launched with more guesses than it
        has now.
        """
        self.rows = rows
        self.whole = whole
        self.following: list[ExpectedRow] = []  # to which the results lead, once they are here
        self._resample = resample
        self.launched = launched

    def wait(self) -> StepResult:
        self.launched.arrived.synchronize()
        width, results = self.launched.width, []
        for row, found in zip(self.rows, self.launched.brought.tolist(), strict=False):
            sampled_tokens = found[: row.num_tokens]
            target_tokens = tuple(sampled_tokens) if row.num_drafts else ()
            kept, drafts = sampled_tokens[: found[width]], tuple(found[width + 1 :])
            if found[width] > row.num_tokens:  # they follow a guess that is not wanted any more
                drafts = ()
            self.following.append(ExpectedRow(row.slot, row.start + len(kept), (kept[-1], *drafts)))
            results.append(RowResult(kept, drafts=drafts, target_tokens=target_tokens))
        return StepResult(self._resample(self.rows, results, self.launched))


class PendingMixedStep:
    """A step with prompts, whose tokens and first guesses are travelling to the host."""

    has_drafts = True

    def __init__(self, rows: list[Row], found: Tensor) -> None:
        """`found` [rows that sample, and padding; 1 + guesses]"""
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
