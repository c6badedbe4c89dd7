"""LoRA kernels for tiles: tokens of one adapter that share one read of its matrices."""

from __future__ import annotations

import triton
import triton.language as tl

from windlass.kernels.triton import pdl
from windlass.kernels.triton.lora_kernels import RANKS, part_of, prefetch, scales_of


@triton.jit(do_not_specialize=["M"])
def shrink_tile_kernel(
    x,
    down,
    scales,
    ranks,
    slots,
    tiles,
    sums,
    M,
    K,
    span,
    rank_stride,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """sums[split, token, part, rank] = down[slot, part] @ x[token], for the tokens of a tile."""
    pdl.release(PDL)
    index = tl.program_id(0)
    part = tl.program_id(1)
    split = tl.program_id(2)
    start = tl.load(tiles + 2 * index)
    count = tl.load(tiles + 2 * index + 1)
    slot = tl.load(slots + start).to(tl.int64)
    rank = tl.load(ranks + slot * rank_stride + part)
    token = tl.arange(0, ROWS)
    row = tl.arange(0, RANKS)
    begin = split * span
    end = tl.minimum(begin + span, K)
    weight = down + (slot * PARTS + part) * MAX_RANK * K
    prefetch(weight + begin, K, rank, end - begin, PDL, PREFETCH)
    pdl.wait(PDL)
    source = x + (start + token).to(tl.int64)[:, None] * K
    to = sums + ((split.to(tl.int64) * M + start + token) * PARTS + part)[:, None] * MAX_RANK
    for first in range(0, rank, RANKS):
        inside = first + row < rank
        if SCALED:
            scale = scales_of(scales, slot * rank_stride + part, first + row, inside, MAX_RANK)
        acc = tl.zeros([ROWS, RANKS], dtype=tl.float32)
        for at in range(begin, end, BLOCK_K):
            k = at + tl.arange(0, BLOCK_K)
            mask = (token < count)[:, None] & (k < end)[None, :]
            values = tl.load(source + k[None, :], mask=mask, other=0.0)
            mask = inside[None, :] & (k < end)[:, None]
            w = tl.load(weight + (first + row)[None, :] * K + k[:, None], mask=mask, other=0)
            acc = tl.dot(values, w.to(values.dtype), acc)
        if SCALED:
            acc *= scale[None, :]
        tl.store(to + (first + row)[None, :], acc, mask=(token < count)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["M", "splits"])
def expand_tile_kernel(
    y,
    up,
    ranks,
    slots,
    tiles,
    sums,
    M,
    N,
    N0,
    N1,
    N2,
    splits,
    rank_stride,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    UNIT: tl.constexpr,
    PREFETCH: tl.constexpr,
    BY_OUTPUT: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[token] += up[slot].T @ (sums over splits), for the tokens of a tile."""
    pdl.release(PDL)
    index = tl.program_id(0)
    part, first, size, tile = part_of(tl.program_id(1), N0, N1, N2, OUTPUTS, UNIT)
    begin = tile * OUTPUTS
    start = tl.load(tiles + 2 * index)
    count = tl.load(tiles + 2 * index + 1)
    slot = tl.load(slots + start).to(tl.int64)
    rank = tl.load(ranks + slot * rank_stride + part)
    weight = up + (slot * N + first) * MAX_RANK
    count_out = tl.minimum(OUTPUTS, size - begin)
    if BY_OUTPUT:
        prefetch(weight + begin * RANKS, count_out, rank, count_out, PDL, PREFETCH)
    else:
        prefetch(weight + begin, size, rank, count_out, PDL, PREFETCH)
    pdl.wait(PDL)
    if rank > 0:
        output = begin + tl.arange(0, OUTPUTS)
        token = tl.arange(0, ROWS)
        row = tl.arange(0, RANKS)
        acc = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
        for at in range(0, rank, RANKS):
            inside = at + row < rank
            mask = inside[:, None] & (output < size)[None, :]
            if BY_OUTPUT:
                rows = weight + at * size + row[:, None] + output[None, :] * RANKS
            else:
                rows = weight + (at + row).to(tl.int64)[:, None] * size + output[None, :]
            w = tl.load(rows, mask=mask, other=0)
            if w.dtype == tl.int8:
                # Sums that include the scale of the codes may underflow in float16.
                kind = y.dtype.element_ty
                w = w.to(tl.bfloat16 if kind == tl.float16 else kind)
            mask = (token < count)[:, None] & inside[None, :]
            low = tl.zeros([ROWS, RANKS], dtype=tl.float32)
            for split in range(splits):
                source = sums + ((split * M + start + token).to(tl.int64) * PARTS + part) * MAX_RANK
                low += tl.load(source[:, None] + (at + row)[None, :], mask=mask, other=0.0)
            acc = tl.dot(low.to(w.dtype), w, acc)
        to = y + (start + token).to(tl.int64)[:, None] * N + (first + output)[None, :]
        mask = (token < count)[:, None] & (output < size)[None, :]
        before = tl.load(to, mask=mask, other=0.0).to(tl.float32)
        tl.store(to, (before + acc).to(y.dtype.element_ty), mask=mask)
