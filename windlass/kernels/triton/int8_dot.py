"""Dot products of int8 codes with values that are quantised on the fly, four at a time (dp4a).

Values are quantised twice: coarsely to 127 steps of the largest magnitude, and the remainder to 1/128
of a step. One instruction then computes four products; otherwise each code would be converted to a
float.
"""

from __future__ import annotations

import triton
import triton.language as tl

_STEPS = tl.constexpr(127.0)
_FINE_STEPS = tl.constexpr(128)


@triton.jit
def _dots(w, x, sums, ASM: tl.constexpr):
    """sums plus the dot products of the four codes in each word."""
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
    """Pack four bytes into a word."""
    return a | (b << 8) | (c << 16) | (d << 24)


@triton.jit
def _quantised(x):
    """Quantise x, at most 127 in magnitude: bytes of integers, and of the remainder in 1/128."""
    # The low bits of x + 1.5 * 2^23 are the nearest integer.
    coarse = x + 12582912.0
    fine = (x - (coarse - 12582912.0)) * _FINE_STEPS + 12582912.0
    return coarse.to(tl.int32, bitcast=True) & 255, fine.to(tl.int32, bitcast=True) & 255


@triton.jit
def quantised_words(a, b, c, d):
    """Quantise four values per word with one scale: (coarse words, fine words, fine step)."""
    largest = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
    largest = tl.max(largest)
    gain = _STEPS / tl.maximum(largest, 1e-30)  # zeros stay zeros
    a, fine_a = _quantised(a * gain)
    b, fine_b = _quantised(b * gain)
    c, fine_c = _quantised(c * gain)
    d, fine_d = _quantised(d * gain)
    unit = largest / (_STEPS * _FINE_STEPS)
    return _word(a, b, c, d), _word(fine_a, fine_b, fine_c, fine_d), unit


@triton.jit
def dot_words(w, coarse, fine, ASM: tl.constexpr):
    """Dot product of each row of code words with quantised values, in units of the fine step."""
    dots = _dots(w, coarse[None, :], tl.zeros_like(w), ASM) * _FINE_STEPS
    return tl.sum(_dots(w, fine[None, :], dots, ASM), 1).to(tl.float32)


@triton.jit
def _four(codes, WORD: tl.constexpr):
    """Pack four of 16 bytes into word number WORD."""
    at = tl.arange(0, 16)
    return tl.sum(tl.where(at // 4 == WORD, codes << (at % 4 * 8), 0), 0)


@triton.jit
def _dots_of_ranks(w, codes, sums, ASM: tl.constexpr):
    """sums plus the dot products of 16 codes in four words with 16 bytes."""
    first, second, third, fourth = w
    none = tl.zeros_like(first)
    sums = _dots(first, none + _four(codes, 0), sums, ASM)
    sums = _dots(second, none + _four(codes, 1), sums, ASM)
    sums = _dots(third, none + _four(codes, 2), sums, ASM)
    return _dots(fourth, none + _four(codes, 3), sums, ASM)


@triton.jit
def dot_ranks(w, low, ASM: tl.constexpr):
    """Dot product of each output's 16 codes (four words) with 16 values: [outputs]."""
    largest = tl.max(tl.abs(low), 0)
    coarse, fine = _quantised(low * (_STEPS / tl.maximum(largest, 1e-30)))
    even, odd = tl.split(tl.reshape(w, [w.shape[0], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    words = (first, second, third, fourth)
    dots = _dots_of_ranks(words, coarse, tl.zeros_like(first), ASM) * _FINE_STEPS
    dots = _dots_of_ranks(words, fine, dots, ASM)
    return dots.to(tl.float32) * (largest / (_STEPS * _FINE_STEPS))
