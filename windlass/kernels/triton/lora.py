"""What adapters add to a product on CUDA: two launches for all adapters and all parts of a layer.

The first (shrink) brings inputs down to an adapter's rank, with K cut into parts whose sums stay
apart; the second (expand) adds them up and goes on to the outputs. In decode steps every token is
by itself, limited by reading its adapter; in others pieces of one row share what they read. A part
that an adapter does not change has rank 0, and so has slot 0: their programs end at once. All that
differs from step to step lies on the device, so that steps can be recorded.

Slots and ranks are copied to the device before the first kernel of a step, and no kernel writes
them: they may be read before the kernel waits, and what they point to be fetched.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.batch import PIECE, AdapterRows
from windlass.kernels.lora import Stacks
from windlass.kernels.triton import chain

_RANKS = tl.constexpr(16)  # that are computed at once
_MOST_PARTS = 3


@triton.jit
def _fetch(at, stride, rank, count, CHAINED: tl.constexpr, FETCH: tl.constexpr):
    """Ask for `count` 16-bit values of the first ranks' rows, before they are read."""
    if FETCH and rank > 0:
        row = tl.minimum(tl.arange(0, _RANKS), rank - 1).to(tl.int64)
        num_bytes = (2 * count + row * 0).to(tl.int32)
        chain.fetch(at + row * stride, num_bytes, CHAINED)


@triton.jit(do_not_specialize=["M"])
def shrink_kernel(
    x,
    down,
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
    CHAINED: tl.constexpr,
):
    """sums[split, token, part, rank] = down[slot, part] @ x[token], over `span` inputs of a split."""
    chain.release(CHAINED)
    token = tl.program_id(0)
    part = tl.program_id(1)
    split = tl.program_id(2)
    slot = tl.load(slots + token).to(tl.int64)
    rank = tl.load(ranks + slot * rank_stride + part)
    row = tl.arange(0, _RANKS)
    begin = split * span
    end = tl.minimum(begin + span, K)
    weight = down + (slot * PARTS + part) * MOST * K
    _fetch(weight + begin, K, rank, end - begin, CHAINED, FETCH)
    chain.wait(CHAINED)
    to = sums + ((split.to(tl.int64) * M + token) * PARTS + part) * MOST
    for first in range(0, rank, _RANKS):
        inside = first + row < rank
        acc = tl.zeros([_RANKS, BLOCK_K], dtype=tl.float32)
        for at in range(begin, end, BLOCK_K):
            k = at + tl.arange(0, BLOCK_K)
            mask = inside[:, None] & (k < end)[None, :]
            w = tl.load(weight + (first + row)[:, None] * K + k[None, :], mask=mask, other=0.0)
            value = tl.load(x + token.to(tl.int64) * K + k, mask=k < end, other=0.0)
            acc += w.to(tl.float32) * value.to(tl.float32)[None, :]
        tl.store(to + first + row, tl.sum(acc, 1), mask=inside)


@triton.jit
def _part_of(tile, N0, N1, N2, OUTPUTS: tl.constexpr):
    """Which part a tile of outputs is of: (part, its first output, its size, the tile in it)."""
    second = tl.cdiv(N0, OUTPUTS)
    third = second + tl.cdiv(N1, OUTPUTS)
    part = (tile >= second).to(tl.int32) + (tile >= third).to(tl.int32)
    first = tl.where(part == 0, 0, tl.where(part == 1, N0, N0 + N1))
    size = tl.where(part == 0, N0, tl.where(part == 1, N1, N2))
    before = tl.where(part == 0, 0, tl.where(part == 1, second, third))
    return part, first, size, tile - before


@triton.jit(do_not_specialize=["M", "splits"])
def expand_kernel(
    y,
    up,
    ranks,
    slots,
    sums,
    M,
    N,
    N0,
    N1,
    N2,
    splits,
    rank_stride,
    PARTS: tl.constexpr,
    MOST: tl.constexpr,
    SPLITS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    FETCH: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """y[token] += up[slot].T @ (sums over splits), for one tile of one part's outputs."""
    chain.release(CHAINED)
    token = tl.program_id(0)
    part, first, size, tile = _part_of(tl.program_id(1), N0, N1, N2, OUTPUTS)
    begin = tile * OUTPUTS
    slot = tl.load(slots + token).to(tl.int64)
    rank = tl.load(ranks + slot * rank_stride + part)
    weight = up + (slot * N + first) * MOST
    _fetch(weight + begin, size, rank, tl.minimum(OUTPUTS, size - begin), CHAINED, FETCH)
    chain.wait(CHAINED)
    if rank > 0:
        output = begin + tl.arange(0, OUTPUTS)
        row = tl.arange(0, _RANKS)
        split = tl.arange(0, SPLITS)
        source = sums + ((split.to(tl.int64) * M + token) * PARTS + part) * MOST
        acc = tl.zeros([OUTPUTS], dtype=tl.float32)
        for at in range(0, rank, _RANKS):
            inside = at + row < rank
            mask = inside[:, None] & (output < size)[None, :]
            rows = weight + (at + row).to(tl.int64)[:, None] * size
            w = tl.load(rows + output[None, :], mask=mask, other=0.0)
            mask = (split < splits)[:, None] & inside[None, :]
            low = tl.load(source[:, None] + (at + row)[None, :], mask=mask, other=0.0)
            acc += tl.sum(w.to(tl.float32) * tl.sum(low, 0)[:, None], 0)
        to = y + token.to(tl.int64) * N + first + output
        before = tl.load(to, mask=output < size, other=0.0).to(tl.float32)
        tl.store(to, (before + acc).to(y.dtype.element_ty), mask=output < size)


@triton.jit(do_not_specialize=["M"])
def shrink_tile_kernel(
    x,
    down,
    ranks,
    slots,
    tiles,
    sums,
    M,
    K,
    span,
    rank_stride,
    PARTS: tl.constexpr,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FETCH: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The same for the tokens of a piece together, which are of one adapter."""
    chain.release(CHAINED)
    piece = tl.program_id(0)
    part = tl.program_id(1)
    split = tl.program_id(2)
    start = tl.load(tiles + 2 * piece)
    count = tl.load(tiles + 2 * piece + 1)
    slot = tl.load(slots + start).to(tl.int64)
    rank = tl.load(ranks + slot * rank_stride + part)
    token = tl.arange(0, ROWS)
    row = tl.arange(0, _RANKS)
    begin = split * span
    end = tl.minimum(begin + span, K)
    weight = down + (slot * PARTS + part) * MOST * K
    _fetch(weight + begin, K, rank, end - begin, CHAINED, FETCH)
    chain.wait(CHAINED)
    source = x + (start + token).to(tl.int64)[:, None] * K
    to = sums + ((split.to(tl.int64) * M + start + token) * PARTS + part)[:, None] * MOST
    for first in range(0, rank, _RANKS):
        inside = first + row < rank
        acc = tl.zeros([ROWS, _RANKS], dtype=tl.float32)
        for at in range(begin, end, BLOCK_K):
            k = at + tl.arange(0, BLOCK_K)
            mask = (token < count)[:, None] & (k < end)[None, :]
            values = tl.load(source + k[None, :], mask=mask, other=0.0)
            mask = inside[None, :] & (k < end)[:, None]
            w = tl.load(weight + (first + row)[None, :] * K + k[:, None], mask=mask, other=0.0)
            acc = tl.dot(values, w, acc)
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
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    FETCH: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The same for the tokens of a piece together."""
    chain.release(CHAINED)
    piece = tl.program_id(0)
    part, first, size, tile = _part_of(tl.program_id(1), N0, N1, N2, OUTPUTS)
    begin = tile * OUTPUTS
    start = tl.load(tiles + 2 * piece)
    count = tl.load(tiles + 2 * piece + 1)
    slot = tl.load(slots + start).to(tl.int64)
    rank = tl.load(ranks + slot * rank_stride + part)
    weight = up + (slot * N + first) * MOST
    _fetch(weight + begin, size, rank, tl.minimum(OUTPUTS, size - begin), CHAINED, FETCH)
    chain.wait(CHAINED)
    if rank > 0:
        output = begin + tl.arange(0, OUTPUTS)
        token = tl.arange(0, ROWS)
        row = tl.arange(0, _RANKS)
        acc = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
        for at in range(0, rank, _RANKS):
            inside = at + row < rank
            mask = inside[:, None] & (output < size)[None, :]
            rows = weight + (at + row).to(tl.int64)[:, None] * size
            w = tl.load(rows + output[None, :], mask=mask, other=0.0)
            mask = (token < count)[:, None] & inside[None, :]
            low = tl.zeros([ROWS, _RANKS], dtype=tl.float32)
            for split in range(splits):
                source = sums + ((split * M + start + token).to(tl.int64) * PARTS + part) * MOST
                low += tl.load(source[:, None] + (at + row)[None, :], mask=mask, other=0.0)
            acc = tl.dot(low.to(w.dtype), w, acc)
        to = y + (start + token).to(tl.int64)[:, None] * N + (first + output)[None, :]
        mask = (token < count)[:, None] & (output < size)[None, :]
        before = tl.load(to, mask=mask, other=0.0).to(tl.float32)
        tl.store(to, (before + acc).to(y.dtype.element_ty), mask=mask)


# By whether every token is by itself.
_KERNELS = {
    True: (shrink_kernel, expand_kernel),
    False: (shrink_tile_kernel, expand_tile_kernel),
}


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a layer's inputs are cut: by their number alone, so that a token's sums never differ."""

    span: int  # inputs of a part of the sums
    splits: int
    block: int  # inputs that are read at once

    @classmethod
    def _of(cls, num_in: int, block: int, most: int) -> _Cut:
        span = triton.cdiv(triton.cdiv(num_in, block), most) * block
        return cls(span, triton.cdiv(num_in, span), block)

    @classmethod
    def alone(cls, num_in: int) -> _Cut:
        return cls._of(num_in, 256, 16)

    @classmethod
    def in_pieces(cls, num_in: int) -> _Cut:
        return cls._of(num_in, 128, 4)


def add_lora(y: Tensor, x: Tensor, stacks: Stacks, adapters: AdapterRows) -> Tensor:
    """As the plain version says, changing y; reads the slots and pieces of `adapters`."""
    assert len(stacks.sizes) <= _MOST_PARTS
    assert x.is_contiguous()
    assert y.is_contiguous()
    tokens, parts, most = x.shape[0], len(stacks.sizes), stacks.down.shape[2]
    alone = adapters.tiles is None
    cut = _Cut.alone(x.shape[1]) if alone else _Cut.in_pieces(x.shape[1])
    sums = x.new_empty((cut.splits, tokens, parts, most), dtype=torch.float32)
    outputs = 256 if alone else 64
    num_tiles = sum(triton.cdiv(size, outputs) for size in stacks.sizes)
    sizes = (y.shape[1], *stacks.sizes, *[0] * (_MOST_PARTS - parts))
    which = (stacks.ranks, adapters.slots, *(() if alone else (adapters.tiles,)))
    stride = stacks.ranks.stride(0)
    pieces = tokens if adapters.tiles is None else adapters.tiles.shape[0]
    options = {"PARTS": parts, "MOST": most, **({} if alone else {"ROWS": PIECE})}
    whole = not any(size % 8 for size in (x.shape[1], *stacks.sizes))  # rows of 16 bytes each
    options |= {"FETCH": whole and x.itemsize == 2, "num_warps": 4, **chain.options()}
    shrink, expand = _KERNELS[alone]
    shrink[pieces, parts, cut.splits](
        *(x, stacks.down, *which, sums, tokens, x.shape[1], cut.span, stride),
        BLOCK_K=cut.block,
        **options,
    )
    if alone:
        options |= {"SPLITS": triton.next_power_of_2(cut.splits)}
    expand[pieces, num_tiles](
        *(y, stacks.up, *which, sums, tokens, *sizes, cut.splits, stride),
        OUTPUTS=outputs,
        **options,
    )
    return y
