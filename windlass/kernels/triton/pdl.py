"""Programmatic dependent launch (PDL): a kernel starts while its predecessor still runs.

Hopper and later GPUs support it. A kernel waits before it reads results of its predecessor. Before
the wait it must not depend on an earlier kernel: it may prefetch weights, but not activations.
"""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from windlass.kernels.gpu import current_gpu


@triton.jit
def release(PDL: tl.constexpr):
    """Let the next kernel start as soon as it fits on the device."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait until all writes of the previous kernel are visible."""
    if PDL:
        gdc_wait()


@triton.jit
def begin(PDL: tl.constexpr):
    """Release and wait, for kernels without work before the wait."""
    release(PDL)
    wait(PDL)


@triton.jit
def prefetch(at, num_bytes, PDL: tl.constexpr):
    """Prefetch `num_bytes` (a multiple of 16) at each address into the L2 cache."""
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
    """Launch options of a kernel with PDL on this device."""
    gpu = current_gpu()
    if gpu is None or gpu.lacks_pdl() is not None:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}
