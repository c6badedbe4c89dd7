"""Products with group-wise int4 and int8 weights: whole numbers inside a group, scaled between.

Activations are two planes of int8, the second one what the first leaves of each value: finer than
16-bit floats, and unpacking weights is cheap: eight 4-bit codes become two words of bytes in three
instructions. The planes are rows of the same product, whose results are added at the end. The
weight's rows are the long side of the tile, as in skinny.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from windlass.kernels.triton import chain
from windlass.kernels.triton.reduce import add_parts


@triton.jit
def _halves(packed, INLINE: tl.constexpr):
    """Bytes of two 4-bit codes to the codes of the low halves and those of the high ones, int8."""
    if INLINE:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 shifted;
            and.b32 $0, $2, 0x0f0f0f0f;
            shr.u32 shifted, $2, 4;
            and.b32 $1, shifted, 0x0f0f0f0f;
            }
            """,
            "=r,=r,r",
            [packed],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    else:
        low, high = (packed & 15).to(tl.int8), (packed >> 4).to(tl.int8)
    return low, high


@triton.jit
def _grouped(
    acc,
    sums_of_codes,
    scales,
    mins,
    x_scale,
    x_sums,
    group,
    outputs,
    planes,
    inside,
    N,
    HAS_MINS: tl.constexpr,
):
    """Add one group's product: scaled whole numbers, and the minimum times the inputs' sum."""
    column = group * N + outputs
    scale = tl.load(scales + column, mask=outputs < N, other=0.0).to(tl.float32)
    acc += sums_of_codes.to(tl.float32) * scale[:, None] * x_scale[None, :]
    if HAS_MINS:
        low = tl.load(mins + column, mask=outputs < N, other=0.0).to(tl.float32)
        x_sum = tl.load(x_sums + planes, mask=inside, other=0.0)
        acc += low[:, None] * x_sum[None, :]
    return acc


@triton.jit
def _scan_block(
    acc,
    x,
    x_scales,
    x_sums,
    codes,
    scales,
    mins,
    block,
    planes,
    inside,
    outputs,
    M,
    N,
    K_PAD,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    HAS_MINS: tl.constexpr,
    INLINE: tl.constexpr,
):
    """One block of 2 HALF inputs: a group or a part of one (GROUP >= 2 HALF), or two groups."""
    at = tl.arange(0, HALF)
    x_at = x + planes[None, :].to(tl.int64) * K_PAD + block * 2 * HALF + at[:, None]
    first = tl.load(x_at, mask=inside[None, :], other=0)
    second = tl.load(x_at + HALF, mask=inside[None, :], other=0)
    x_scale = tl.load(x_scales + block * 2 * M + planes, mask=inside, other=0.0)
    w_mask = (outputs < N)[:, None]
    if BITS == 4:
        w_at = codes + outputs[:, None].to(tl.int64) * (K_PAD // 2) + block * HALF + at[None, :]
        low, high = _halves(tl.load(w_at, mask=w_mask, other=0), INLINE)
    else:
        w_at = codes + outputs[:, None].to(tl.int64) * K_PAD + block * 2 * HALF + at[None, :]
        low = tl.load(w_at, mask=w_mask, other=0)
        high = tl.load(w_at + HALF, mask=w_mask, other=0)
    whole = tl.dot(low, first, out_dtype=tl.int32)
    if GROUP >= 2 * HALF:
        whole = tl.dot(high, second, whole, out_dtype=tl.int32)
        group = block * 2 * HALF // GROUP
        acc = _grouped(
            acc,
            whole,
            scales,
            mins,
            x_scale,
            x_sums + block * 2 * M,
            group,
            outputs,
            planes,
            inside,
            N,
            HAS_MINS,
        )
    else:
        other = tl.dot(high, second, out_dtype=tl.int32)
        near, far = x_sums + 4 * block * M, x_sums + (4 * block + 2) * M
        acc = _grouped(
            acc,
            whole,
            scales,
            mins,
            x_scale,
            near,
            2 * block,
            outputs,
            planes,
            inside,
            N,
            HAS_MINS,
        )
        acc = _grouped(
            acc,
            other,
            scales,
            mins,
            x_scale,
            far,
            2 * block + 1,
            outputs,
            planes,
            inside,
            N,
            HAS_MINS,
        )
    return acc


@triton.jit(do_not_specialize=["M", "splits", "fetched"])
def grouped_linear_kernel(
    x,
    x_scales,
    x_sums,
    codes,
    scales,
    mins,
    out,
    parts,
    counters,
    M,
    N,
    K_PAD,
    splits,
    fetched,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    HAS_MINS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INLINE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """out[M, N] = x @ weight.T; `fetched` bytes of each row's codes come before the wait."""
    chain.release(CHAINED)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    lane = tl.arange(0, 2 * ROWS)
    token = tl.program_id(2) * ROWS + lane % ROWS
    planes = lane // ROWS * M + token  # rows of x: first all tokens, then what is left of them
    blocks = K_PAD // (2 * HALF)
    span = tl.cdiv(blocks, splits)
    begin = split * span
    end = tl.minimum(begin + span, blocks)
    row_bytes = K_PAD * BITS // 8
    block_bytes: tl.constexpr = 2 * HALF * BITS // 8
    ahead = tl.minimum(fetched, (end - begin) * block_bytes)
    first = tl.minimum(outputs, N - 1).to(tl.int64) * row_bytes + begin * block_bytes
    chain.fetch(codes + first, (first * 0 + ahead).to(tl.int32), CHAINED)
    chain.wait(CHAINED)
    acc = tl.zeros([OUTPUTS, 2 * ROWS], dtype=tl.float32)
    for block in range(begin, end):
        acc = _scan_block(
            acc,
            x,
            x_scales,
            x_sums,
            codes,
            scales,
            mins,
            block,
            planes,
            token < M,
            outputs,
            M,
            N,
            K_PAD,
            BITS,
            GROUP,
            HALF,
            HAS_MINS,
            INLINE,
        )
    acc = tl.sum(tl.reshape(acc, [OUTPUTS, 2, ROWS]), 1)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    at = rows[None, :].to(tl.int64) * N + outputs[:, None]
    mask = (rows < M)[None, :] & (outputs < N)[:, None]
    whole = True
    if SPLIT:
        counter = counters + tl.program_id(2) * tl.num_programs(0) + tile
        acc, whole = add_parts(acc, parts, M * N, counter, split, splits, at, mask)
    if whole:
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)
