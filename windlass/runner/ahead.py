"""What a recorded verification on CUDA reads, brings back and leads to; its launches, also early ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from windlass.core.types import Row, SlotId, StepPlan


@dataclass(frozen=True, slots=True)
class Found:
    """What a verification leaves on the device."""

    logits: Tensor
    back: Tensor  # [size, width + 1 + guesses]: samples, how many are kept, and the next guesses


@dataclass(frozen=True, slots=True)
class Launched:
    """A verification that is being computed."""

    logits: Tensor
    brought: Tensor
    arrived: torch.cuda.Event
    width: int
    drafting: int  # guesses for the next step that it makes
    places: int  # of a row, among the logits


class Recorded:
    """Owns a recording and its mail: pinned memory for what is sent, and for what two steps bring."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, inbox: Tensor, found: Found, shape: tuple[int, int, int]
    ) -> None:
        """`shape`: the tokens of a row, the guesses that are made for the next step, and a row's places."""
        self._graph = graph
        self._inbox = inbox
        self._shape = shape
        self._back = found.back
        self.logits = found.logits
        self._sent = torch.empty(inbox.shape, dtype=torch.int32, pin_memory=True)
        self._brought = [torch.empty_like(found.back, device="cpu").pin_memory() for _ in "ab"]
        self._arrived = [torch.cuda.Event() for _ in "ab"]
        self._turn = 0

    def send(self, rows: list[Row], nobody: list[int]) -> None:
        """Write the rows down; those that only pad are `nobody`. The last step's were read long ago."""
        lines = self._sent.numpy()
        for i, row in enumerate(rows):
            count = row.num_tokens
            lines[i, : 3 + count] = (row.slot, row.start, count, *(row.tokens or (-1,)))
        lines[len(rows) :] = nobody
        self._inbox.copy_(self._sent, non_blocking=True)

    def launch(self) -> Launched:
        """Compute what lies in the inbox."""
        self._turn ^= 1
        brought, arrived = self._brought[self._turn], self._arrived[self._turn]
        self._graph.replay()
        brought.copy_(self._back, non_blocking=True)
        arrived.record()
        return Launched(self.logits, brought, arrived, *self._shape)


class Next(NamedTuple):
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
class Ahead:
    """A verification that was launched before it was planned."""

    following: list[Next]  # its rows, filled in by the one before when that has arrived
    launched: Launched
    guesses: int  # of every row

    def is_for(self, plan: StepPlan) -> bool:
        """Whether a plan asks for this and nothing else."""
        if plan.freed or plan.admitted or plan.copies or plan.adapters:
            return False
        if len(plan.rows) != len(self.following):
            return False
        pairs = zip(self.following, plan.rows, strict=True)
        return all(expected.covers(row) for expected, row in pairs)
