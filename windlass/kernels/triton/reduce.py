"""Sums that several programs make together, in an order that does not depend on who is last."""

from __future__ import annotations

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


def splits_for(programs: int, blocks: int) -> int:
    """Into how many parts K is cut, so that a small weight fills the device too."""
    wanted = max(1, 2 * 132 // programs)
    return max(1, min(8, 1 << (wanted.bit_length() - 1), blocks))
