"""Quantisation of keys and values to 8-bit codes, inside the kernels that write them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_of(largest, kind: tl.constexpr):
    """The scales of heads with these largest magnitudes, as `reference.encode` defines them."""
    max_code: tl.constexpr = 127.0 if kind == tl.int8 else 448.0
    return tl.maximum(tl.div_rn(largest, max_code), 1e-30)


@triton.jit
def encode(x, scale, kind: tl.constexpr):
    """Quantise x to the nearest codes."""
    codes = tl.div_rn(x, scale)
    if kind == tl.int8:
        # Adding 1.5 * 2^23 rounds a float32 to the nearest integer, ties to even.
        codes = (codes + 12582912.0) - 12582912.0
    return codes.to(kind)
