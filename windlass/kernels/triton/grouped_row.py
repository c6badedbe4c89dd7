"""GEMMs of one row with group-wise int4 and int8 weights: integer dot products of whole rows in registers.

As in gemv.py, the weight is on its way before the kernel before ends. Four products take one instruction,
so unpacking takes less time than reading. Inputs are the two planes of grouped.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from windlass.kernels.triton import pdl


@triton.jit
def _dot4(a, b, acc, INLINE: tl.constexpr):
    """acc plus the products of the four signed bytes in each word."""
    if INLINE:
        acc = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, acc],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        for byte in tl.static_range(4):
            acc += ((a << (24 - 8 * byte)) >> 24) * ((b << (24 - 8 * byte)) >> 24)
    return acc


@triton.jit
def _group_sums(weights, first, second, INLINE: tl.constexpr):
    """The sums over each half block of the products with both planes, in units of the second."""
    coarse = _dot4(weights, first, tl.zeros_like(weights), INLINE)
    return tl.sum(_dot4(weights, second, coarse * 254, INLINE), 2).to(tl.float32)


@triton.jit
def _group_values(values, outputs, block, mask, N, GROUP: tl.constexpr, HALF: tl.constexpr):
    """Scales or offsets of both halves of each block: two of [outputs, blocks]."""
    first = block * 2 * HALF // GROUP
    second = (block * 2 * HALF + HALF) // GROUP
    at = values + outputs[:, None]
    low = tl.load(at + (first * N)[None, :], mask=mask, other=0.0).to(tl.float32)
    high = tl.load(at + (second * N)[None, :], mask=mask, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def grouped_row_kernel(
    x,
    x_scales,
    x_sums,
    codes,
    scales,
    offsets,
    out,
    N,
    stride,
    plane_stride,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    BLOCKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INLINE: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[N] = weight[N, K] @ x[K].

    Codes and planes are read as words of four bytes; `stride` and `plane_stride`: words of a row.
    """
    pdl.release(PDL)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    safe = tl.minimum(outputs, N - 1)  # outputs past the end are not stored
    block = tl.arange(0, BLOCKS)
    half_words: tl.constexpr = HALF // 4
    word = tl.arange(0, half_words)[None, None, :]
    inside = block * (2 * half_words) < plane_stride
    mask = inside[None, :, None]
    if BITS == 4:
        at = block[None, :, None] * half_words + word
        at = codes + safe[:, None, None].to(tl.int64) * stride + at
        packed = tl.load(at, mask=mask, other=0)
    else:
        at = block[None, :, None] * (2 * half_words) + word
        at = codes + safe[:, None, None].to(tl.int64) * stride + at
        low, high = tl.load(at, mask=mask, other=0), tl.load(at + half_words, mask=mask, other=0)
    low_scales, high_scales = _group_values(scales, safe, block, inside[None, :], N, GROUP, HALF)
    if offsets is not None:
        low_offsets, high_offsets = _group_values(
            offsets, safe, block, inside[None, :], N, GROUP, HALF
        )
    pdl.wait(PDL)
    x_at = x + block[None, :, None] * (2 * half_words) + word
    x_low, x_high = (
        tl.load(x_at, mask=mask, other=0),
        tl.load(x_at + half_words, mask=mask, other=0),
    )
    x_at += plane_stride
    e_low, e_high = (
        tl.load(x_at, mask=mask, other=0),
        tl.load(x_at + half_words, mask=mask, other=0),
    )
    x_scale = tl.load(x_scales + block * 2 + 1, mask=inside, other=0.0)[None, :]
    if BITS == 4:
        low, high = packed & 0x0F0F0F0F, (packed >> 4) & 0x0F0F0F0F
    value = _group_sums(low, x_low, e_low, INLINE) * low_scales
    value += _group_sums(high, x_high, e_high, INLINE) * high_scales
    acc = tl.sum(value * x_scale, 1)
    if offsets is not None:
        each: tl.constexpr = 2 if GROUP < 2 * HALF else 1  # sums per block
        sum_at = x_sums + block * 2 * each
        first = tl.load(sum_at, mask=inside, other=0.0)
        first += tl.load(sum_at + 1, mask=inside, other=0.0)
        shifted = first[None, :] * low_offsets
        if each == 2:
            second = tl.load(sum_at + 2, mask=inside, other=0.0)
            second += tl.load(sum_at + 3, mask=inside, other=0.0)
            shifted += second[None, :] * high_offsets
        acc += tl.sum(shifted, 1)
    tl.store(out + outputs, acc.to(out.dtype.element_ty), mask=outputs < N)
