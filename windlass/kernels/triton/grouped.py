"""GEMMs with group-wise int4 and int8 weights: integer arithmetic within a group, scaled per group.

Activations are int8 planes. The second plane holds the quantisation error of the first; two planes
are finer than 16-bit floats. Unpacking weights is cheap: three instructions turn eight 4-bit codes
into two words of bytes. The planes are rows of one GEMM, whose results are added at the end. The
weight's rows are the long side of the tile, as in skinny.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from windlass.kernels.triton import pdl
from windlass.kernels.triton.reduce import add_splits


@triton.jit
def _halves(packed, INLINE: tl.constexpr):
    """Unpack bytes of two 4-bit codes to int8: (low halves, high halves)."""
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
def _scan_block(
    acc,
    x,
    x_scales,
    codes,
    scales,
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
    EVEN: tl.constexpr,
    REPEATED: tl.constexpr,
    INLINE: tl.constexpr,
):
    """Accumulate a block of 2 HALF inputs: all or index of a group (GROUP >= 2 HALF), or two groups."""
    at = tl.arange(0, HALF)
    x_at = x + planes[None, :].to(tl.int64) * K_PAD + block * 2 * HALF + at[:, None]
    if REPEATED:
        first, second = tl.load(x_at), tl.load(x_at + HALF)
    else:
        first = tl.load(x_at, mask=inside[None, :], other=0)
        second = tl.load(x_at + HALF, mask=inside[None, :], other=0)
    x_scale = tl.load(x_scales + block * 2 * M + planes)[None, :]
    if not EVEN:
        outputs = tl.minimum(outputs, N - 1)  # outputs past the end are not stored
    if BITS == 4:
        w_at = codes + outputs[:, None].to(tl.int64) * (K_PAD // 2) + block * HALF + at[None, :]
        low, high = _halves(tl.load(w_at), INLINE)
    else:
        w_at = codes + outputs[:, None].to(tl.int64) * K_PAD + block * 2 * HALF + at[None, :]
        low, high = tl.load(w_at), tl.load(w_at + HALF)
    group = block * 2 * HALF // GROUP
    scale = tl.load(scales + group * N + outputs).to(tl.float32)
    next_scale = scale
    if GROUP < 2 * HALF:
        next_scale = tl.load(scales + (group + 1) * N + outputs).to(tl.float32)
    sums = tl.dot(low, first, out_dtype=tl.int32)
    if GROUP >= 2 * HALF:
        sums = tl.dot(high, second, sums, out_dtype=tl.int32)
        acc += sums.to(tl.float32) * (scale[:, None] * x_scale)
    else:
        next_sums = tl.dot(high, second, out_dtype=tl.int32)
        acc += sums.to(tl.float32) * (scale[:, None] * x_scale)
        acc += next_sums.to(tl.float32) * (next_scale[:, None] * x_scale)
    return acc


@triton.jit
def _add_offsets(
    acc,
    x_sums,
    offsets,
    begin,
    end,
    rows,
    outputs,
    M,
    N,
    GROUP: tl.constexpr,
    SUMMED: tl.constexpr,
    PLANES: tl.constexpr,
):
    """Add the groups' offsets times the input sums [begin, end), of SUMMED inputs each."""
    for first in range(begin, end, 32):
        index = first + tl.arange(0, 32)
        at = (index * SUMMED // GROUP)[None, :] * N + outputs[:, None]
        mask = (index < end)[None, :] & (outputs < N)[:, None]
        offset = tl.load(offsets + at, mask=mask, other=0.0).to(tl.float32)
        sums_at = x_sums + index[:, None] * 2 * M + rows[None, :]
        mask = (index < end)[:, None] & (rows < M)[None, :]
        sums = tl.load(sums_at, mask=mask, other=0.0)
        if PLANES == 2:
            sums += tl.load(sums_at + M, mask=mask, other=0.0)
        acc = tl.dot(offset, sums, acc, input_precision="tf32x3")
    return acc


@triton.jit(do_not_specialize=["M", "splits", "prefetched"])
def grouped_linear_kernel(
    x,
    x_scales,
    x_sums,
    codes,
    scales,
    offsets,
    out,
    partial_sums,
    counters,
    M,
    N,
    K_PAD,
    splits,
    prefetched,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    PLANES: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    EVEN: tl.constexpr,
    INLINE: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[M, N] = x @ weight.T; `prefetched` bytes of each row's codes are prefetched.

    EVEN: OUTPUTS divides N.
    """
    pdl.release(PDL)
    tile, split = tl.program_id(0), tl.program_id(1)
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    lane = tl.arange(0, PLANES * ROWS)
    # Rows of x: the first plane of all tokens, then the second. The last row repeats past the end;
    # with many rows, repeated reads cost less than masks.
    planes = lane // ROWS * M + tl.minimum(lane % ROWS, M - 1)
    inside = lane % ROWS < M
    repeated: tl.constexpr = ROWS > 16
    span = tl.cdiv(K_PAD // (2 * HALF), splits)
    begin = split * span
    end = tl.minimum(begin + span, K_PAD // (2 * HALF))
    block_bytes: tl.constexpr = 2 * HALF * BITS // 8
    num_bytes = tl.maximum(tl.minimum(prefetched, (end - begin) * block_bytes), 0)
    first = tl.minimum(outputs, N - 1).to(tl.int64) * (K_PAD * BITS // 8) + begin * block_bytes
    pdl.prefetch(codes + first, (first * 0 + num_bytes).to(tl.int32), PDL)
    pdl.wait(PDL)
    acc = tl.zeros([OUTPUTS, PLANES * ROWS], dtype=tl.float32)
    for block in range(begin, end):
        acc = _scan_block(
            acc, x, x_scales, codes, scales, block, planes, inside, outputs, M, N, K_PAD,
            BITS, GROUP, HALF, EVEN, repeated, INLINE,
        )  # fmt: skip
    if PLANES == 2:
        acc = tl.sum(tl.reshape(acc, [OUTPUTS, 2, ROWS]), 1)
    rows = tl.arange(0, ROWS)
    if offsets is not None:
        summed: tl.constexpr = min(GROUP, 2 * HALF)
        each: tl.constexpr = 2 * HALF // summed
        acc = _add_offsets(
            acc,
            x_sums,
            offsets,
            begin * each,
            end * each,
            rows,
            outputs,
            M,
            N,
            GROUP,
            summed,
            PLANES,
        )
    at = rows[None, :] * N + outputs[:, None]
    mask = (rows < M)[None, :] & (outputs < N)[:, None]
    complete = True
    if SPLIT:
        acc, complete = add_splits(
            acc, partial_sums, M * N, counters + tile, split, splits, at, mask
        )
    if complete:
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)
