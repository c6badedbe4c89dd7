"""Block tables and last sampled tokens by slot.

The host copy of the tables is authoritative. A CUDA device has its own copy, updated in step order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.core.types import BlockId, Row, SlotId, StepPlan
from windlass.kernels.storages import Held, held


class SlotTables:
    """Owns the block tables and the last sampled token of each slot, plus one padding slot.

    There is one table per group of the KV layout. Blocks that the scheduler frees behind a window
    stay in the table; kernels do not read them.
    """

    def __init__(
        self,
        num_slots: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        scratch: int = 0,
        num_groups: int = 1,
    ) -> None:
        """`scratch`: the block of the padding slot. The block after it must be unused, too."""
        self.size = block_size
        self.num_slots = num_slots
        self.num_groups = num_groups
        self.device = device
        self._host = np.zeros((num_groups, num_slots + 1, max_blocks), dtype=np.int32)
        self._scratch = scratch
        self.spare = scratch + 1
        self._host[:, num_slots] = scratch
        self._num_blocks = np.zeros(num_slots + 1, dtype=np.int64)
        on_cpu = device.type == "cpu"
        self.tables = torch.from_numpy(self._host)
        if not on_cpu:
            self.tables = self.tables.to(device)
        # Last sampled token by slot.
        self.last = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self.last_on_host: NDArray[Any] = self.last.numpy() if on_cpu else np.empty(0)

    def storages(self) -> Iterator[Held]:
        return held("tables", self.tables, self.last)

    def clear(self, slots: Sequence[SlotId]) -> None:
        """Point all table entries of these slots to the scratch block."""
        if slots:
            at = np.array(slots)
            self._host[:, at] = self._scratch
            self.tables[:, to_device(at, self.device)] = self._scratch  # asynchronous

    def apply(self, plan: StepPlan) -> list[Row]:
        """Reset the tables of admitted slots and append new blocks; returns the rows that have any."""
        for admission in plan.admitted:
            self._num_blocks[admission.slot] = 0
        grown = [row for row in plan.rows if row.blocks]
        for row in grown:
            used = self._num_blocks[row.slot]
            end = used + len(row.blocks) // self.num_groups
            self._host[:, row.slot, used:end] = np.reshape(row.blocks, (self.num_groups, -1))
            self._num_blocks[row.slot] = end
        return grown

    def blocks_of(self, slot: SlotId) -> list[BlockId]:
        """The blocks of a slot in token order, for each group, one group after the other."""
        return list(map(BlockId, self._host[:, slot, : self._num_blocks[slot]].flatten().tolist()))

    def has_room(self, slot: SlotId, num_tokens: int) -> bool:
        """Whether a slot has blocks for `num_tokens`; the last table entry is not used."""
        return num_tokens <= min(int(self._num_blocks[slot]), self._host.shape[2] - 1) * self.size

    def send(self, rows: list[Row]) -> None:
        """Copy the tables of these rows to the device."""
        if not rows or self.device.type == "cpu":
            return
        slots = np.array([row.slot for row in rows])
        width = int(self._num_blocks[slots].max())
        fresh = to_device(self._host[:, slots, :width], self.device)
        self.tables[:, to_device(slots, self.device), :width] = fresh

    def set_last(self, slots: Sequence[SlotId], tokens: Sequence[int]) -> None:
        """Store the last sampled tokens of slots."""
        if self.device.type == "cpu":
            for slot, token in zip(slots, tokens, strict=True):
                self.last_on_host[slot] = token
        else:
            at = to_device(np.array(slots, dtype=np.int64), self.device)
            self.last[at] = to_device(np.array(tokens, dtype=np.int32), self.device)

    def fill_last(self, ids: Tensor, token_slots: Tensor) -> Tensor:
        """Replace -1 by the last sampled token of the slot."""
        return torch.where(ids < 0, self.last[token_slots], ids)


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to the device, asynchronously on CUDA."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
