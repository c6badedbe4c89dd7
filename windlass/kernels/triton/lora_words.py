"""Products of int8 codes with numbers that are rounded to whole ones, four at a time.

Numbers are rounded twice: to 127 steps of the largest, and what that leaves to 128 steps of a step.
Four products are one instruction then, where codes would have to become floats one by one.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
def rounded_words(a, b, c, d):
    """Words of four numbers each, as steps and finer ones, and what a finer one is worth."""
    largest = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
    largest = tl.max(largest)
    gain = _STEPS / tl.maximum(largest, 1e-30)  # zeros stay zeros
    a, finer_a = _rounded(a * gain)
    b, finer_b = _rounded(b * gain)
    c, finer_c = _rounded(c * gain)
    d, finer_d = _rounded(d * gain)
    worth = largest / (_STEPS * _FINER)
    return _word(a, b, c, d), _word(finer_a, finer_b, finer_c, finer_d), worth


@triton.jit
def sum_of_products(w, steps, finer, ASM: tl.constexpr):
    """Of each row of words of codes with such numbers, in units of a finer step."""
    dots = _dots(w, steps[None, :], tl.zeros_like(w), ASM) * _FINER
    return tl.sum(_dots(w, finer[None, :], dots, ASM), 1).to(tl.float32)


@triton.jit
def _four(codes, WORD: tl.constexpr):
    """One of the words that 16 bytes make."""
    at = tl.arange(0, 16)
    return tl.sum(tl.where(at // 4 == WORD, codes << (at % 4 * 8), 0), 0)


@triton.jit
def _dots_of_ranks(w, codes, sums, ASM: tl.constexpr):
    first, second, third, fourth = w
    none = tl.zeros_like(first)
    sums = _dots(first, none + _four(codes, 0), sums, ASM)
    sums = _dots(second, none + _four(codes, 1), sums, ASM)
    sums = _dots(third, none + _four(codes, 2), sums, ASM)
    return _dots(fourth, none + _four(codes, 3), sums, ASM)


@triton.jit
def ranks_product(w, low, ASM: tl.constexpr):
    """16 codes in four words of each of some outputs, times 16 numbers: [outputs]"""
    largest = tl.max(tl.abs(low), 0)
    steps, finer = _rounded(low * (_STEPS / tl.maximum(largest, 1e-30)))
    even, odd = tl.split(tl.reshape(w, [w.shape[0], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    words = (first, second, third, fourth)
    dots = _dots_of_ranks(words, steps, tl.zeros_like(first), ASM) * _FINER
    dots = _dots_of_ranks(words, finer, dots, ASM)
    return dots.to(tl.float32) * (largest / (_STEPS * _FINER))
