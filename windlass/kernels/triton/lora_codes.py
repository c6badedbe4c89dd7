"""Shrink for adapters in int8 codes, for tokens by themselves: products of whole numbers.

Inputs are rounded to whole numbers too, twice: to 127 steps of the largest of a block, and what that
leaves to 128 steps of a step. Four products are one instruction then, where codes would have to
become floats one by one. Expanding gains nothing by this: codes that meet lie apart there.

Inputs are a multiple of 16, x has 16 bits, and four codes are read as one word.
"""

from __future__ import annotations

import triton
import triton.language as tl

from windlass.kernels.triton.lora_kernels import RANKS, begin_shrink, scales_of

_STEPS = tl.constexpr(127.0)
_FINER = tl.constexpr(128)


@triton.jit
def _dots(w, x, sums, ASM: tl.constexpr):
    """sums + the products of four codes each."""
    if ASM:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [w, x, sums],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    for i in tl.static_range(4):
        sums += ((w << (24 - 8 * i)) >> 24) * ((x << (24 - 8 * i)) >> 24)
    return sums


@triton.jit
def _word(a, b, c, d):
    return a | (b << 8) | (c << 16) | (d << 24)


@triton.jit
def _rounded(x):
    """x, of at most 127, as bytes of whole numbers, and of 1/128 of what these leave."""
    # Added to 1.5 * 2^23, the nearest whole number is the last bits of a float.
    steps = x + 12582912.0
    finer = (x - (steps - 12582912.0)) * _FINER + 12582912.0
    return steps.to(tl.int32, bitcast=True) & 255, finer.to(tl.int32, bitcast=True) & 255


@triton.jit
def _value(x, i: tl.constexpr, KIND: tl.constexpr):
    """The i-th of four values of 16 bits in a word of 64."""
    return (x >> (16 * i)).to(tl.int16).to(KIND, bitcast=True).to(tl.float32)


@triton.jit
def _rounded_inputs(x, KIND: tl.constexpr):
    """Words of four inputs, as steps and finer ones, and what a finer one is worth."""
    a, b, c, d = _value(x, 0, KIND), _value(x, 1, KIND), _value(x, 2, KIND), _value(x, 3, KIND)
    largest = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
    largest = tl.max(largest)
    gain = tl.where(largest > 0, _STEPS / largest, 0.0)
    a, finer_a = _rounded(a * gain)
    b, finer_b = _rounded(b * gain)
    c, finer_c = _rounded(c * gain)
    d, finer_d = _rounded(d * gain)
    worth = largest / (_STEPS * _FINER)
    return _word(a, b, c, d), _word(finer_a, finer_b, finer_c, finer_d), worth


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
    MOST: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FETCH: tl.constexpr,
    ASM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """As `shrink_kernel`; the inputs of a block share the worth of a step."""
    token, place, rank, begin, end, weight, to = begin_shrink(
        *(down, ranks, slots, sums, M, K, span, rank_stride), PARTS, MOST, FETCH, CHAINED
    )
    row = tl.arange(0, RANKS)
    weight = weight.to(tl.pointer_type(tl.int32))
    inputs = (x + token.to(tl.int64) * K).to(tl.pointer_type(tl.int64))
    for first in range(0, rank, RANKS):
        inside = first + row < rank
        scale = scales_of(scales, place, first + row, inside, MOST)
        total = tl.zeros([RANKS], dtype=tl.float32)
        for at in range(begin, end, BLOCK_K):
            word = at // 4 + tl.arange(0, BLOCK_K // 4)
            mask = inside[:, None] & (word < end // 4)[None, :]
            w = tl.load(weight + (first + row)[:, None] * (K // 4) + word[None, :], mask, other=0)
            values = tl.load(inputs + word, mask=word < end // 4, other=0)
            steps, finer, worth = _rounded_inputs(values, x.dtype.element_ty)
            dots = _dots(w, steps[None, :], tl.zeros_like(w), ASM) * _FINER
            dots = _dots(w, finer[None, :], dots, ASM)
            total += tl.sum(dots, 1).to(tl.float32) * worth
        tl.store(to + first + row, total * scale, mask=inside)
