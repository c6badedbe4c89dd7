"""Products with group-wise int4 and int8 weights: whole numbers inside a group, scaled between.

Activations are planes of int8, the second one what the first leaves of each value: two are finer
than 16-bit floats, and unpacking weights is cheap: eight 4-bit codes become two words of bytes in
three instructions. The planes are rows of the same product, whose results are added at the end.
The weight's rows are the long side of the tile, as in skinny.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from windlass.kernels.triton import pdl
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
    """One block of 2 HALF inputs: a group or a part of one (GROUP >= 2 HALF), or two groups."""
    at = tl.arange(0, HALF)
    x_at = x + planes[None, :].to(tl.int64) * K_PAD + block * 2 * HALF + at[:, None]
    if REPEATED:
        first, second = tl.load(x_at), tl.load(x_at + HALF)
    else:
        first = tl.load(x_at, mask=inside[None, :], other=0)
        second = tl.load(x_at + HALF, mask=inside[None, :], other=0)
    x_scale = tl.load(x_scales + block * 2 * M + planes)[None, :]
    if not EVEN:
        outputs = tl.minimum(outputs, N - 1)  # what is past the end is dropped when it is stored
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
    whole = tl.dot(low, first, out_dtype=tl.int32)
    if GROUP >= 2 * HALF:
        whole = tl.dot(high, second, whole, out_dtype=tl.int32)
        acc += whole.to(tl.float32) * (scale[:, None] * x_scale)
    else:
        other = tl.dot(high, second, out_dtype=tl.int32)
        acc += whole.to(tl.float32) * (scale[:, None] * x_scale)
        acc += other.to(tl.float32) * (next_scale[:, None] * x_scale)
    return acc


@triton.jit
def _add_minima(
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
    """What the groups' minima make of the inputs' sums, [begin, end) of SUMMED inputs each."""
    for first in range(begin, end, 32):
        part = first + tl.arange(0, 32)
        at = (part * SUMMED // GROUP)[None, :] * N + outputs[:, None]
        mask = (part < end)[None, :] & (outputs < N)[:, None]
        low = tl.load(offsets + at, mask=mask, other=0.0).to(tl.float32)
        sums_at = x_sums + part[:, None] * 2 * M + rows[None, :]
        mask = (part < end)[:, None] & (rows < M)[None, :]
        sums = tl.load(sums_at, mask=mask, other=0.0)
        if PLANES == 2:
            sums += tl.load(sums_at + M, mask=mask, other=0.0)
        acc = tl.dot(low, sums, acc, input_precision="tf32x3")
    return acc


@triton.jit(do_not_specialize=["M", "splits", "fetched"])
def grouped_linear_kernel(
    x,
    x_scales,
    x_sums,
    codes,
    scales,
    offsets,
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
    PLANES: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    EVEN: tl.constexpr,
    INLINE: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[M, N] = x @ weight.T; `fetched` bytes of each row's codes come before the wait.

    EVEN: OUTPUTS divides N.
    """
    pdl.release(PDL)
    tile, split = tl.program_id(0), tl.program_id(1)
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    lane = tl.arange(0, PLANES * ROWS)
    # Rows of x: first all tokens, then what is left of them. Past the end the last one stands again;
    # many rows are read like that, which costs less than to ask each time which are there.
    planes = lane // ROWS * M + tl.minimum(lane % ROWS, M - 1)
    inside = lane % ROWS < M
    repeated: tl.constexpr = ROWS > 16
    span = tl.cdiv(K_PAD // (2 * HALF), splits)
    begin = split * span
    end = tl.minimum(begin + span, K_PAD // (2 * HALF))
    block_bytes: tl.constexpr = 2 * HALF * BITS // 8
    ahead = tl.maximum(tl.minimum(fetched, (end - begin) * block_bytes), 0)
    first = tl.minimum(outputs, N - 1).to(tl.int64) * (K_PAD * BITS // 8) + begin * block_bytes
    pdl.fetch(codes + first, (first * 0 + ahead).to(tl.int32), PDL)
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
        acc = _add_minima(
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
    whole = True
    if SPLIT:
        acc, whole = add_parts(acc, parts, M * N, counters + tile, split, splits, at, mask)
    if whole:
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)
