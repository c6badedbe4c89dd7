"""Split-K sums across programs, in an order that does not depend on which one finishes last."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from windlass.kernels.storages import Held, held


@triton.jit
def add_splits(acc, partial_sums, stride, counter, split, splits, at, mask):
    """Store one partial sum; the last program adds all of them: (sum, whether it is complete).

    The counter is zero before and after.
    """
    tl.store(partial_sums + split * stride + at, acc, mask=mask)
    tl.debug_barrier()
    complete = tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1
    if complete:
        acc = tl.zeros_like(acc)
        for other in range(splits):
            acc += tl.load(
                partial_sums + other * stride + at, mask=mask, other=0.0, cache_modifier=".cg"
            )
        tl.store(counter, 0)
    return acc, complete


class SplitWorkspace:
    """Workspace of split-K sums. Owned by a kernel; its GEMMs, all on one stream, share it."""

    def __init__(self) -> None:
        self.partial_sums = torch.empty(0)
        self.counters = torch.empty(0)

    def storages(self) -> Iterator[Held]:
        return held("tables", self.partial_sums, self.counters)

    def reserve(self, device: torch.device, num_values: int, num_counters: int) -> None:
        """Grow the workspace for one more GEMM. Call it before any launch."""
        if num_values > self.partial_sums.numel():
            self.partial_sums = torch.empty(num_values, dtype=torch.float32, device=device)
        if num_counters > self.counters.numel():
            self.counters = torch.zeros(num_counters, dtype=torch.int32, device=device)
