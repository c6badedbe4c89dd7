"""Sums that several programs make together, in an order that does not depend on who is last."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def add_parts(acc, parts, stride, counter, split, splits, at, mask):
    """Leave one part of a sum; whoever comes last gets all of it: (sum, whether it is whole).

    The counter is zero before and after.
    """
    tl.store(parts + split * stride + at, acc, mask=mask)
    tl.debug_barrier()
    whole = tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1
    if whole:
        acc = tl.zeros_like(acc)
        for part in range(splits):
            acc += tl.load(parts + part * stride + at, mask=mask, other=0.0, cache_modifier=".cg")
        tl.store(counter, 0)
    return acc, whole


class Space:
    """Where the parts of sums meet. Owned by a kernel; its products, of one stream, share it."""

    def __init__(self) -> None:
        self.parts = torch.empty(0)
        self.counters = torch.empty(0)

    def reserve(self, device: torch.device, num_values: int, num_counters: int) -> None:
        """Before anything is launched: room for one more product's parts."""
        if num_values > self.parts.numel():
            self.parts = torch.empty(num_values, dtype=torch.float32, device=device)
        if num_counters > self.counters.numel():
            self.counters = torch.zeros(num_counters, dtype=torch.int32, device=device)
