"""Shrink for int8 adapters and single tokens, in integer arithmetic.

The number of inputs is a multiple of 16, x has 16 bits, and a word holds four codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from windlass.kernels.triton.int8_dot import dot_words, quantised_words
from windlass.kernels.triton.lora_kernels import RANKS, begin_shrink, scales_of


@triton.jit
def _value(x, i: tl.constexpr, KIND: tl.constexpr):
    """The i-th of four 16-bit values in a 64-bit word."""
    return (x >> (16 * i)).to(tl.int16).to(KIND, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=["M"])
def shrink_codes_kernel(
    x,
    down,
    scales,
    ranks,
    slots,
    sums,
    M,
    K,
    span,
    rank_stride,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `shrink_kernel`; the inputs of a block share one quantisation scale."""
    token, index, rank, begin, end, weight, to = begin_shrink(
        *(down, ranks, slots, sums, M, K, span, rank_stride), PARTS, MAX_RANK, PREFETCH, PDL
    )
    KIND: tl.constexpr = x.dtype.element_ty
    row = tl.arange(0, RANKS)
    weight = weight.to(tl.pointer_type(tl.int32))
    inputs = (x + token.to(tl.int64) * K).to(tl.pointer_type(tl.int64))
    for first in range(0, rank, RANKS):
        inside = first + row < rank
        scale = scales_of(scales, index, first + row, inside, MAX_RANK)
        total = tl.zeros([RANKS], dtype=tl.float32)
        for at in range(begin, end, BLOCK_K):
            word = at // 4 + tl.arange(0, BLOCK_K // 4)
            mask = inside[:, None] & (word < end // 4)[None, :]
            w = tl.load(weight + (first + row)[:, None] * (K // 4) + word[None, :], mask, other=0)
            values = tl.load(inputs + word, mask=word < end // 4, other=0)
            a, b = _value(values, 0, KIND), _value(values, 1, KIND)
            c, d = _value(values, 2, KIND), _value(values, 3, KIND)
            coarse, fine, unit = quantised_words(a, b, c, d)
            total += dot_words(w, coarse, fine, ASM) * unit
        tl.store(to + first + row, total * scale, mask=inside)
