"""Block tables by slot, and a plan's rows as the arrays that a network reads.

The host's copy of the tables is the truth; a CUDA device has a copy of its own that is kept up to
date in the order of the steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from windlass.core.types import BlockId, Row, SlotId, StepPlan
from windlass.kernels.batch import LayerKV, Span, StepBatch


class SlotTables:
    """Owns, per slot, the block table and the token sampled last. One slot more is for padding."""

    def __init__(
        self,
        num_slots: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        scratch: int = 0,
    ) -> None:
        """`scratch` is the block that the padding slot reads and writes; the one after it is spare."""
        self.size = block_size
        self.num_slots = num_slots
        self.device = device
        self._host = np.zeros((num_slots + 1, max_blocks), dtype=np.int32)
        self._scratch = scratch
        self.spare = scratch + 1
        self._host[num_slots] = scratch
        self._num_blocks = np.zeros(num_slots + 1, dtype=np.int64)
        on_cpu = device.type == "cpu"
        self.tables = torch.from_numpy(self._host)
        if not on_cpu:
            self.tables = self.tables.to(device)
        # The tokens sampled last.
        self.last = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)

    def clear(self, slots: Sequence[SlotId]) -> None:
        """Let what these slots have no block for be read from and written to the scratch block."""
        if slots:
            at = np.array(slots)
            self._host[at] = self._scratch
            self.tables[to_device(at, self.device)] = self._scratch  # waits for nothing

    def apply(self, plan: StepPlan) -> list[Row]:
        """Start the tables of admitted requests, append the rows' blocks; returns rows with any."""
        for admission in plan.admitted:
            self._num_blocks[admission.slot] = 0
        grown = [row for row in plan.rows if row.blocks]
        for row in grown:
            used = self._num_blocks[row.slot]
            self._host[row.slot, used : used + len(row.blocks)] = row.blocks
            self._num_blocks[row.slot] = used + len(row.blocks)
        return grown

    def blocks_of(self, slot: SlotId) -> list[BlockId]:
        """All that a slot has, in the order of their tokens."""
        return self._host[slot, : self._num_blocks[slot]].tolist()

    def has_room(self, slot: SlotId, num_tokens: int) -> bool:
        """Whether a slot has blocks for so many tokens; the last of all may be past the longest context."""
        return num_tokens <= min(int(self._num_blocks[slot]), self._host.shape[1] - 1) * self.size

    def send(self, rows: list[Row]) -> None:
        """Bring the device's copy of these rows' tables up to date."""
        if not rows or self.device.type == "cpu":
            return
        slots = np.array([row.slot for row in rows])
        most = int(self._num_blocks[slots].max())
        fresh = to_device(self._host[slots, :most], self.device)
        self.tables[to_device(slots, self.device), :most] = fresh

    def batch(self, plan: StepPlan, kv: list[LayerKV]) -> tuple[Tensor, StepBatch]:
        """Token ids of the plan's rows, packed, and everything that goes with them."""
        spans = spans_of(plan.rows)
        total = spans[-1].first + spans[-1].count
        # Whole multiples of 16 numbers keep every row aligned: kernels are compiled for that.
        packed = np.zeros((3, -(-total // 16) * 16), dtype=np.int32)
        pack(plan.rows, spans, packed)
        ids, positions, token_slots = to_device(packed, self.device)[:, :total]
        return self.known(ids, token_slots), StepBatch(
            positions, token_slots, self.tables, spans, kv
        )

    def known(self, ids: Tensor, token_slots: Tensor) -> Tensor:
        """Token ids, with those sampled last in the place of -1."""
        return torch.where(ids < 0, self.last[token_slots], ids)


def spans_of(rows: Sequence[Row]) -> list[Span]:
    """Where each row's tokens are when all are packed one after another."""
    spans, first = [], 0
    for row in rows:
        spans.append(Span(first, row.num_tokens, row.start))
        first += row.num_tokens
    return spans


def pack(rows: Sequence[Row], spans: Sequence[Span], into: np.ndarray) -> None:
    """Write token ids (-1: the one sampled last), positions and slots of all tokens: [3, …]."""
    counts = [span.count for span in spans]
    known: list[int] = []
    for row in rows:
        known.extend(row.tokens or (-1,))
    total = len(known)
    into[0, :total] = known
    into[1, :total] = np.arange(total) - np.repeat([s.first - s.start for s in spans], counts)
    into[2, :total] = np.repeat([row.slot for row in rows], counts)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor of the array's content; on CUDA it travels while the host goes on."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
