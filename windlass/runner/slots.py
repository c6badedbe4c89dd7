"""Block tables by slot, and packing of a plan's rows into arrays.

The host copy of the tables is authoritative. A CUDA device has its own copy, updated in step order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.core.types import BlockId, Row, SlotId, StepPlan
from windlass.kernels.batch import LayerKV, Span, StepBatch


class SlotTables:
    """Owns the block table and the last sampled token of each slot, plus one padding slot."""

    def __init__(
        self,
        num_slots: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        scratch: int = 0,
    ) -> None:
        """`scratch` is the block of the padding slot; the block after it is spare."""
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
        # Last sampled token by slot.
        self.last = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)

    def clear(self, slots: Sequence[SlotId]) -> None:
        """Point all table entries of these slots to the scratch block."""
        if slots:
            at = np.array(slots)
            self._host[at] = self._scratch
            self.tables[to_device(at, self.device)] = self._scratch  # asynchronous

    def apply(self, plan: StepPlan) -> list[Row]:
        """Reset the tables of admitted slots and append new blocks; returns the rows that have any."""
        for admission in plan.admitted:
            self._num_blocks[admission.slot] = 0
        grown = [row for row in plan.rows if row.blocks]
        for row in grown:
            used = self._num_blocks[row.slot]
            self._host[row.slot, used : used + len(row.blocks)] = row.blocks
            self._num_blocks[row.slot] = used + len(row.blocks)
        return grown

    def blocks_of(self, slot: SlotId) -> list[BlockId]:
        """The blocks of a slot in token order."""
        return self._host[slot, : self._num_blocks[slot]].tolist()

    def has_room(self, slot: SlotId, num_tokens: int) -> bool:
        """Whether a slot has blocks for `num_tokens`; the last table entry is not used."""
        return num_tokens <= min(int(self._num_blocks[slot]), self._host.shape[1] - 1) * self.size

    def send(self, rows: list[Row]) -> None:
        """Copy the tables of these rows to the device."""
        if not rows or self.device.type == "cpu":
            return
        slots = np.array([row.slot for row in rows])
        width = int(self._num_blocks[slots].max())
        fresh = to_device(self._host[slots, :width], self.device)
        self.tables[to_device(slots, self.device), :width] = fresh

    def batch(self, plan: StepPlan, kv: list[LayerKV]) -> tuple[Tensor, StepBatch]:
        """The packed token ids of a plan and its batch metadata."""
        spans = spans_of(plan.rows)
        total = spans[-1].first + spans[-1].count
        # Multiples of 16 entries keep every row aligned, as kernels assume.
        packed = np.zeros((3, -(-total // 16) * 16), dtype=np.int32)
        pack(plan.rows, spans, packed)
        ids, positions, token_slots = to_device(packed, self.device)[:, :total]
        return self.fill_last(ids, token_slots), StepBatch(
            positions=positions, token_slots=token_slots, tables=self.tables, spans=spans, kv=kv
        )

    def fill_last(self, ids: Tensor, token_slots: Tensor) -> Tensor:
        """Replace -1 by the last sampled token of the slot."""
        return torch.where(ids < 0, self.last[token_slots], ids)


def spans_of(rows: Sequence[Row]) -> list[Span]:
    """The range of each row's tokens in the packed step."""
    spans, first = [], 0
    for row in rows:
        spans.append(Span(first, row.num_tokens, row.start))
        first += row.num_tokens
    return spans


def pack(rows: Sequence[Row], spans: Sequence[Span], into: NDArray[Any]) -> None:
    """Write token ids (-1: last sampled token), positions and slots of all tokens: [3, tokens]."""
    counts = [span.count for span in spans]
    known: list[int] = []
    for row in rows:
        known.extend(row.tokens or (-1,))
    total = len(known)
    into[0, :total] = known
    into[1, :total] = np.arange(total) - np.repeat([s.first - s.start for s in spans], counts)
    into[2, :total] = np.repeat([row.slot for row in rows], counts)


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to the device, asynchronously on CUDA."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
