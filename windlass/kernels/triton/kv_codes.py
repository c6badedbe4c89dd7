"""Keys and values as one-byte codes with a scale, inside of the kernels that write them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_of(largest, kind: tl.constexpr):
    """The scale of heads whose largest magnitudes are given; `reference.encode` defines it."""
    most: tl.constexpr = 127.0 if kind == tl.int8 else 448.0
    return tl.maximum(tl.div_rn(largest, most), 1e-30)


@triton.jit
def coded(x, scale, kind: tl.constexpr):
    """The nearest codes of x."""
    codes = tl.div_rn(x, scale)
    if kind == tl.int8:
        # Where a float32 has no room for fractions, addition rounds to the nearest even.
        codes = (codes + 12582912.0) - 12582912.0
    return codes.to(kind)
