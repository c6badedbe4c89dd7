"""Kernels of a step as a chain: each starts while the last one still runs, and waits only to read.

On Hopper and later a launch may say so (programmatic dependent launch). What a kernel does before
it waits must not depend on a kernel before it: weights may be fetched, activations may not.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def release(PDL: tl.constexpr):
    """Let the next kernel start as soon as there is room for it."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Go on when all that the last kernel wrote is there to be read."""
    if PDL:
        gdc_wait()


@triton.jit
def begin(PDL: tl.constexpr):
    """For kernels that have nothing to do before they wait."""
    release(PDL)
    wait(PDL)


@triton.jit
def fetch(at, num_bytes, PDL: tl.constexpr):
    """Bring bytes (a multiple of 16) at each of some addresses nearer, to be read after the wait."""
    if PDL:
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
            "=r,l,r",
            [at.to(tl.int64, bitcast=True), num_bytes],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@cache
def options() -> dict[str, bool]:
    """How a kernel of a chain is launched on this device."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
