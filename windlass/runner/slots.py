"""Block tables by slot, and a plan's rows as the arrays that a network reads."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from windlass.core.types import StepPlan
from windlass.kernels.batch import LayerKV, Span, StepBatch


class SlotTables:
    """Owns, per slot, the block table and the token sampled last."""

    def __init__(self, num_slots: int, max_blocks: int, block_size: int) -> None:
        self._size = block_size
        self._tables = np.zeros((num_slots, max_blocks), dtype=np.int64)
        self._num_blocks = np.zeros(num_slots, dtype=np.int64)
        self._last = np.zeros(num_slots, dtype=np.int64)

    def apply(self, plan: StepPlan) -> None:
        """Start the tables of admitted requests, and append the blocks that rows bring."""
        for admission in plan.admitted:
            self._num_blocks[admission.slot] = 0
        for row in plan.rows:
            if row.blocks:
                used = self._num_blocks[row.slot]
                self._tables[row.slot, used : used + len(row.blocks)] = row.blocks
                self._num_blocks[row.slot] = used + len(row.blocks)

    def sampled(self, slot: int, token: int) -> None:
        self._last[slot] = token

    def batch(
        self, plan: StepPlan, kv: list[LayerKV], device: torch.device
    ) -> tuple[Tensor, StepBatch]:
        """Token ids of the plan's rows, packed, and everything that goes with them."""
        rows = plan.rows
        slots = np.array([row.slot for row in rows])
        counts = np.array([row.num_tokens for row in rows])
        starts = np.array([row.start for row in rows])
        firsts = np.cumsum(counts) - counts
        ids: list[int] = []
        for row in rows:
            ids.extend(row.tokens or (int(self._last[row.slot]),))
        positions = np.arange(len(ids)) - np.repeat(firsts - starts, counts)
        blocks = self._tables[np.repeat(slots, counts), positions // self._size]
        most = int(self._num_blocks[slots].max())

        def tensor(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device)

        spans = [
            Span(first, count, start)
            for first, count, start in zip(
                firsts.tolist(), counts.tolist(), starts.tolist(), strict=True
            )
        ]
        batch = StepBatch(
            tensor(positions),
            tensor(blocks),
            tensor(positions % self._size),
            tensor(self._tables[slots, :most]),
            spans,
            kv,
        )
        return torch.tensor(ids, device=device), batch
