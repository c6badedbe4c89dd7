"""LoRA kernels for single tokens: shrink and expand. lora_tiles.py has those for tiles.

Matrices may be int8 codes, which every dtype of x represents exactly; then shrink multiplies its sums
by the scales of the ranks. With BY_OUTPUT, 16 ranks of an output are adjacent: one load reads them,
and the sums are quantised for an integer dot product.

Slots, ranks and matrices are copied to the device before the first kernel of a step, and no kernel
writes them. So a kernel may read or prefetch them before it waits for its predecessor (PDL).
"""

from __future__ import annotations

import triton
import triton.language as tl

from windlass.kernels.triton import pdl
from windlass.kernels.triton.int8_dot import dot_ranks
from windlass.kernels.triton.norm import normed

RANKS = tl.constexpr(16)  # per iteration


@triton.jit
def prefetch(at, stride, rank, count, PDL: tl.constexpr, PREFETCH: tl.constexpr):
    """Prefetch `count` values of the rows of the first ranks."""
    if PREFETCH and rank > 0:
        row = tl.minimum(tl.arange(0, RANKS), rank - 1).to(tl.int64)
        num_bytes = (count * (at.dtype.element_ty.primitive_bitwidth // 8) + row * 0).to(tl.int32)
        pdl.prefetch(at + row * stride, num_bytes, PDL)


@triton.jit
def _floats(w, PDL: tl.constexpr):
    """Convert w to float32. A code becomes the low byte of 2^23 as a float: conversions are slow."""
    if PDL and w.dtype == tl.int8:
        lifted = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 positive;
            xor.b32 positive, $4, 0x80808080;
            prmt.b32 $0, positive, 0x4b000000, 0x7440;
            prmt.b32 $1, positive, 0x4b000000, 0x7441;
            prmt.b32 $2, positive, 0x4b000000, 0x7442;
            prmt.b32 $3, positive, 0x4b000000, 0x7443;
            }
            """,
            "=r,=r,=r,=r,r",
            [w],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )
        return lifted - 8388736.0
    return w.to(tl.float32)


@triton.jit
def scales_of(scales, index, rank, inside, MAX_RANK: tl.constexpr):
    """Load the scales of some ranks; `index` is that of the part in `ranks`."""
    return tl.load(scales + index * MAX_RANK + rank, mask=inside, other=0.0)


@triton.jit
def begin_shrink(
    down,
    ranks,
    slots,
    sums,
    M,
    K,
    span,
    rank_stride,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute a single-token program's work items, and wait for the previous kernel.

    Returns (token, index of its rank in `ranks`, rank, first input, end of inputs, matrix, sums).
    """
    pdl.release(PDL)
    token = tl.program_id(0)
    part = tl.program_id(1)
    split = tl.program_id(2)
    slot = tl.load(slots + token).to(tl.int64)
    index = slot * rank_stride + part
    rank = tl.load(ranks + index)
    begin = split * span
    end = tl.minimum(begin + span, K)
    weight = down + (slot * PARTS + part) * MAX_RANK * K
    prefetch(weight + begin, K, rank, end - begin, PDL, PREFETCH)
    pdl.wait(PDL)
    to = sums + ((split.to(tl.int64) * M + token) * PARTS + part) * MAX_RANK
    return token, index, rank, begin, end, weight, to


@triton.jit(do_not_specialize=["M"])
def shrink_kernel(
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
    SCALED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """sums[split, token, part, rank] = down[slot, part] @ x[token], over the `span` inputs of a split."""
    token, index, rank, begin, end, weight, to = begin_shrink(
        *(down, ranks, slots, sums, M, K, span, rank_stride), PARTS, MAX_RANK, PREFETCH, PDL
    )
    row = tl.arange(0, RANKS)
    for first in range(0, rank, RANKS):
        inside = first + row < rank
        if SCALED:
            scale = scales_of(scales, index, first + row, inside, MAX_RANK)
        acc = tl.zeros([RANKS, BLOCK_K], dtype=tl.float32)
        for at in range(begin, end, BLOCK_K):
            k = at + tl.arange(0, BLOCK_K)
            mask = inside[:, None] & (k < end)[None, :]
            w = tl.load(weight + (first + row)[:, None] * K + k[None, :], mask=mask, other=0)
            value = tl.load(x + token.to(tl.int64) * K + k, mask=k < end, other=0.0)
            acc += _floats(w, PDL) * value.to(tl.float32)[None, :]
        total = tl.sum(acc, 1)
        if SCALED:
            total *= scale
        tl.store(to + first + row, total, mask=inside)


@triton.jit
def part_of(tile, N0, N1, N2, OUTPUTS: tl.constexpr, UNIT: tl.constexpr):
    """Map a tile of outputs to its part: (part, its first output, its size, tile within the part).

    Sizes are multiples of `UNIT`. The compiler must know that, because it determines the load width.
    """
    second = tl.cdiv(N0, OUTPUTS)
    third = second + tl.cdiv(N1, OUTPUTS)
    part = (tile >= second).to(tl.int32) + (tile >= third).to(tl.int32)
    first = tl.where(part == 0, 0, tl.where(part == 1, N0, N0 + N1))
    size = tl.where(part == 0, N0, tl.where(part == 1, N1, N2))
    before = tl.where(part == 0, 0, tl.where(part == 1, second, third))
    return part, tl.multiple_of(first, UNIT), tl.multiple_of(size, UNIT), tile - before


@triton.jit
def _rows(weight, slot, first, output, size, MAX_RANK: tl.constexpr, BY_OUTPUT: tl.constexpr):
    """Load the values of RANKS ranks for some outputs of a part; slot 0 loads nothing.

    Values beyond the adapter's rank are arbitrary; their sums count as zero.
    """
    read = (output < size) & (slot > 0)
    if BY_OUTPUT:
        words = (weight + first * size).to(tl.pointer_type(tl.int32))
        at = output[:, None] * 4 + tl.arange(0, 4)[None, :]
        return tl.load(words + at, mask=read[:, None], other=0)
    else:
        rank = first + tl.arange(0, RANKS)
        at = rank.to(tl.int64)[:, None] * size + output[None, :]
        return tl.load(weight + at, mask=(rank < MAX_RANK)[:, None] & read[None, :], other=0)


@triton.jit
def _low(source, stride, ranks, rank, splits, SPLITS: tl.constexpr):
    """Add the partial sums of some ranks; the splits are `stride` apart."""
    split = tl.arange(0, SPLITS)
    mask = (split < splits)[:, None] & (ranks < rank)[None, :]
    return tl.sum(tl.load(source + split[:, None] * stride + ranks[None, :], mask, other=0.0), 0)


@triton.jit
def _gemm(
    w, source, stride, first, rank, splits,
    SPLITS: tl.constexpr, BY_OUTPUT: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply the sums of RANKS ranks by their values for some outputs."""
    low = _low(source, stride, first + tl.arange(0, RANKS), rank, splits, SPLITS)
    if BY_OUTPUT:
        return dot_ranks(w, low, ASM)
    else:
        return tl.sum(_floats(w, PDL) * low[:, None], 0)


@triton.jit
def _delta(
    w, weight, slot, source, stride, rank, output, size, splits,
    MAX_RANK: tl.constexpr, SPLITS: tl.constexpr,
    BY_OUTPUT: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The LoRA delta of some outputs of a part; `w` has the values of the first ranks."""
    acc = _gemm(w, source, stride, 0, rank, splits, SPLITS, BY_OUTPUT, ASM, PDL)
    if MAX_RANK > RANKS:
        for first in range(RANKS, rank, RANKS):
            more = _rows(weight, slot, first, output, size, MAX_RANK, BY_OUTPUT)
            acc += _gemm(more, source, stride, first, rank, splits, SPLITS, BY_OUTPUT, ASM, PDL)
    return acc


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
    MAX_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    UNIT: tl.constexpr,
    BY_OUTPUT: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[token] += up[slot].T @ (sums over splits), for one tile of one part's outputs."""
    pdl.release(PDL)
    token = tl.program_id(0)
    part, first, size, tile = part_of(tl.program_id(1), N0, N1, N2, OUTPUTS, UNIT)
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    slot = tl.load(slots + token).to(tl.int64)
    weight = up + (slot * N + first) * MAX_RANK
    w = _rows(weight, slot, 0, output, size, MAX_RANK, BY_OUTPUT)
    rank = tl.load(ranks + slot * rank_stride + part)
    pdl.wait(PDL)
    if rank > 0:
        source = sums + (token.to(tl.int64) * PARTS + part) * MAX_RANK
        stride = M.to(tl.int64) * PARTS * MAX_RANK
        to = y + token.to(tl.int64) * N + first + output
        before = tl.load(to, mask=output < size, other=0.0).to(tl.float32)
        acc = _delta(
            *(w, weight, slot, source, stride, rank, output, size, splits),
            *(MAX_RANK, SPLITS, BY_OUTPUT, ASM, PDL),
        )
        tl.store(to, (before + acc).to(y.dtype.element_ty), mask=output < size)


@triton.jit(do_not_specialize=["M", "splits"])
def expand_gated_kernel(
    y,
    up,
    ranks,
    slots,
    sums,
    out,
    M,
    N,
    splits,
    rank_stride,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BY_OUTPUT: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[token] = silu(gate) * up of y[token] [2 N] plus its LoRA delta; y is not changed."""
    pdl.release(PDL)
    token = tl.program_id(0)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    slot = tl.load(slots + token).to(tl.int64)
    gates = up + slot * 2 * N * MAX_RANK
    ups = gates + N * MAX_RANK
    w_gate = _rows(gates, slot, 0, output, N, MAX_RANK, BY_OUTPUT)
    w_up = _rows(ups, slot, 0, output, N, MAX_RANK, BY_OUTPUT)
    gate_rank = tl.load(ranks + slot * rank_stride)
    up_rank = tl.load(ranks + slot * rank_stride + 1)
    pdl.wait(PDL)
    mask = output < N
    source = sums + token.to(tl.int64) * PARTS * MAX_RANK
    stride = M.to(tl.int64) * PARTS * MAX_RANK
    row = y + token.to(tl.int64) * 2 * N
    kind = y.dtype.element_ty
    gate = tl.load(row + output, mask=mask, other=0.0).to(tl.float32)
    wide = tl.load(row + N + output, mask=mask, other=0.0).to(tl.float32)
    gate += _delta(
        *(w_gate, gates, slot, source, stride, gate_rank, output, N, splits),
        *(MAX_RANK, SPLITS, BY_OUTPUT, ASM, PDL),
    )
    wide += _delta(
        *(w_up, ups, slot, source + MAX_RANK, stride, up_rank, output, N, splits),
        *(MAX_RANK, SPLITS, BY_OUTPUT, ASM, PDL),
    )
    # Round where the reference implementation rounds.
    gate = gate.to(kind).to(tl.float32)
    active = (gate / (1 + tl.exp(-gate))).to(kind) * wide.to(kind)
    tl.store(out + token.to(tl.int64) * N + output, active, mask=mask)


@triton.jit(do_not_specialize=["M", "splits"])
def expand_norm_kernel(
    y,
    up,
    ranks,
    slots,
    sums,
    residual,
    gains,
    out,
    M,
    splits,
    rank_stride,
    eps,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    MAX_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BY_OUTPUT: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """residual[token] += y[token] plus its LoRA delta; out[token] = norm(residual) * gains."""
    pdl.release(PDL)
    token = tl.program_id(0).to(tl.int64)
    output = tl.arange(0, WIDTH)
    mask = output < SIZE
    slot = tl.load(slots + token).to(tl.int64)
    weight = up + slot * SIZE * MAX_RANK
    w = _rows(weight, slot, 0, output, SIZE, MAX_RANK, BY_OUTPUT)
    gain = tl.load(gains + output, mask=mask, other=0.0)
    rank = tl.load(ranks + slot * rank_stride)
    pdl.wait(PDL)
    at = token * SIZE + output
    value = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
    before = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    source, stride = sums + token * MAX_RANK, M.to(tl.int64) * MAX_RANK
    value += _delta(
        *(w, weight, slot, source, stride, rank, output, SIZE, splits),
        *(MAX_RANK, SPLITS, BY_OUTPUT, ASM, PDL),
    )
    # Round where the reference implementation rounds.
    total = (value.to(y.dtype.element_ty).to(tl.float32) + before).to(residual.dtype.element_ty)
    tl.store(residual + at, total, mask=mask)
    tl.store(out + at, normed(total.to(tl.float32), gain, eps, SIZE), mask=mask)
