"""Drafting with Medusa heads on CUDA: three kernels, not a dozen operators.

Each kernel computes all heads: the residual blocks; the GEMMs with the vocabulary matrices, which
write only the highest score of each tile; and the maximum over tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.triton import pdl
from windlass.kernels.triton.fit import fit
from windlass.kernels.triton.skinny import MAX_ROWS, padded

_TOKENS = 128  # of the vocabulary, per program
_OUTPUTS = 32  # of a residual block, per program
_BLOCK_K = 64


@triton.jit
def _prefetch(weight, outputs, num_outputs, SIZE: tl.constexpr, PDL: tl.constexpr):
    """Prefetch the weight rows of some outputs."""
    if SIZE % 8 == 0:
        rows = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
        pdl.prefetch(weight + rows * SIZE, (2 * SIZE + rows * 0).to(tl.int32), PDL)


@triton.jit
def _gemm(x, weight, outputs, num_outputs, rows, SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
    """weight[outputs] @ x.T in float32: [outputs, rows]; `rows` are the offsets of the rows of x."""
    acc = tl.zeros([outputs.shape[0], rows.shape[0]], dtype=tl.float32)
    w_at = weight + tl.minimum(outputs, num_outputs - 1).to(tl.int64)[:, None] * SIZE
    for start in range(0, SIZE, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w = tl.load(w_at + k[None, :], mask=(k < SIZE)[None, :], other=0.0)
        value = tl.load(x + rows[None, :] + k[:, None], mask=(k < SIZE)[:, None], other=0.0)
        acc = tl.dot(w, value, acc)
    return acc


@triton.jit(do_not_specialize=["M", "head_stride"])
def medusa_block_kernel(
    x,
    indices,
    weight,
    bias,
    out,
    M,
    head_stride,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[head, row] = x + silu(weight[head] @ x + bias[head]); x is row `indices[row]`, if given."""
    pdl.release(PDL)
    head = tl.program_id(1).to(tl.int64)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    _prefetch(weight + head * SIZE * SIZE, output, SIZE, SIZE, PDL)
    pdl.wait(PDL)
    row = tl.arange(0, ROWS)
    index = tl.minimum(row, M - 1)
    if indices is not None:
        index = tl.load(indices + index)
    x += head * head_stride
    begins = index.to(tl.int64) * SIZE
    acc = _gemm(x, weight + head * SIZE * SIZE, output, SIZE, begins, SIZE, BLOCK_K)
    mask = (output < SIZE)[:, None] & (row < M)[None, :]
    kind = out.dtype.element_ty
    shift = tl.load(bias + head * SIZE + output, mask=output < SIZE, other=0.0)
    value = (acc + shift.to(tl.float32)[:, None]).to(kind).to(tl.float32)
    before = tl.load(x + begins[None, :] + output[:, None], mask=mask, other=0.0).to(tl.float32)
    active = (value / (1 + tl.exp(-value))).to(kind).to(tl.float32)
    to = out + (head * M + row[None, :]) * SIZE + output[:, None]
    tl.store(to, (before + active).to(kind), mask=mask)


@triton.jit(do_not_specialize=["M"])
def medusa_scores_kernel(
    x,
    weight,
    best,
    best_at,
    M,
    vocab,
    tiles,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """best[head, row, tile]: the highest score of a tile of tokens; `best_at` is its token."""
    pdl.release(PDL)
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    _prefetch(weight + head * vocab * SIZE, token, vocab, SIZE, PDL)
    pdl.wait(PDL)
    row = tl.arange(0, ROWS)
    begins = (head * M + tl.minimum(row, M - 1)) * SIZE
    acc = _gemm(x, weight + head * vocab * SIZE, token, vocab, begins, SIZE, BLOCK_K)
    acc = tl.where((token < vocab)[:, None], acc, float("-inf"))
    top, at = tl.max(acc, 0, return_indices=True)
    to = (head * M + row) * tiles + tile
    tl.store(best + to, top, mask=row < M)
    tl.store(best_at + to, tile * TOKENS + at, mask=row < M)


@triton.jit
def _token_at(best_at, index, offsets):
    """The token of a tile's highest score, mapped to the target vocabulary."""
    token = tl.load(best_at + index)
    if offsets is not None:
        token = (token + tl.load(offsets + token)).to(tl.int32)
    return token


@triton.jit(do_not_specialize=["M"])
def medusa_join_kernel(
    best,
    best_at,
    offsets,
    drafts,
    M,
    heads,
    tiles,
    COUNT: tl.constexpr,
    SIBLINGS: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """drafts[row, head]; token 0 where there is no head, which the governor learns to be rejected.

    After them come the first head's next best tokens, each from another tile.
    """
    pdl.begin(PDL)
    row = tl.program_id(0)
    head = tl.program_id(1)
    to = drafts + row * (COUNT + SIBLINGS)
    token = tl.zeros([], dtype=tl.int32)
    if head < heads:
        tile = tl.arange(0, TILES)
        first = (head * M + row) * tiles
        top = tl.load(best + first + tile, mask=tile < tiles, other=float("-inf"))
        at = tl.argmax(top, 0)
        token = _token_at(best_at, first + at, offsets)
        if head == 0:
            for i in tl.static_range(SIBLINGS):
                top = tl.where(tile == at, float("-inf"), top)
                at = tl.argmax(top, 0)
                tl.store(to + COUNT + i, _token_at(best_at, first + at, offsets))
    tl.store(to + head, token)


def most_likely(
    hidden: Tensor,
    indices: Tensor,
    blocks: list[tuple[Tensor, Tensor]],
    matrices: Tensor,
    offsets: Tensor | None,
    count: int,
    siblings: int = 0,
) -> Tensor:
    """Draft tokens [rows, count + siblings], int32, from hidden states at up to 64 indices.

    `blocks` and `matrices` are those of `speculative.medusa`; `offsets` is d2t. The last `siblings`
    tokens are alternatives to the first.
    """
    rows, size = indices.shape[0], hidden.shape[1]
    assert rows <= MAX_ROWS
    heads, vocab = min(count, matrices.shape[0]), matrices.shape[1]
    shape = {"SIZE": size, "ROWS": padded(rows), "BLOCK_K": _BLOCK_K, **pdl.options()}
    x, stride = hidden, 0
    at: Tensor | None = indices
    for matrix, bias in blocks:
        out = hidden.new_empty((heads, rows, size))
        medusa_block_kernel[triton.cdiv(size, _OUTPUTS), heads](
            *(x, at, matrix, bias, out, rows, stride), OUTPUTS=_OUTPUTS, **shape
        )
        x, at, stride = out, None, rows * size
    tiles = triton.cdiv(vocab, _TOKENS)
    assert siblings < tiles
    best = hidden.new_empty((heads, rows, tiles), dtype=torch.float32)
    best_at = torch.empty_like(best, dtype=torch.int32)
    fit(medusa_scores_kernel)[tiles, heads](
        *(x, matrices, best, best_at, rows, vocab, tiles), TOKENS=_TOKENS, num_stages=4, **shape
    )
    drafts = torch.empty((rows, count + siblings), dtype=torch.int32, device=hidden.device)
    medusa_join_kernel[rows, count](
        *(best, best_at, offsets, drafts, rows, heads, tiles),
        COUNT=count,
        SIBLINGS=siblings,
        TILES=triton.next_power_of_2(tiles),
        **pdl.options(),
    )
    return drafts
