"""The GEMMs of mixture-of-experts MLPs: tiles of one expert's pairs, and the sum over a token's experts.

The weight's rows are the long side of a tile, as in skinny.py, so one kernel serves one pair and many.
Every output is one sum over K, in order, so a row's result depends neither on other rows nor on the
tiling. The first GEMM reads gate and up of a column as adjacent rows of its tile and applies the
activation; the second one stores a row per pair, which `combine_kernel` adds in the order of a
token's experts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from windlass.kernels.triton import pdl


@triton.jit
def _activated(gate, up, KIND: tl.constexpr, alpha, limit):
    """The expert's activation, in float32."""
    if KIND == "clamped":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1
        return gate / (1 + tl.exp(-alpha * gate)) * up
    elif KIND == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate / (1 + tl.exp(-2 * inner)) * up
    else:
        return gate / (1 + tl.exp(-gate)) * up


@triton.jit
def _weight_rows(N: tl.constexpr, OUTPUTS: tl.constexpr, GATED: tl.constexpr, ORDER: tl.constexpr):
    """Rows of an expert's weight in this program's tile; rows past the end repeat the last one."""
    at = tl.arange(0, OUTPUTS)
    if GATED:
        column = tl.minimum(tl.program_id(0) * (OUTPUTS // 2) + at // 2, N // 2 - 1)
        row = 2 * column + at % 2 if ORDER == "interleaved" else at % 2 * (N // 2) + column
    else:
        row = tl.minimum(tl.program_id(0) * OUTPUTS + at, N - 1)
    return row


@triton.jit
def _inputs(x_at, start, k, inside, K: tl.constexpr, BLOCK_K: tl.constexpr, REPEATED: tl.constexpr):
    """Inputs [BLOCK_K, rows] from `start` on; with REPEATED, rows that are not inside are read, too."""
    if K % BLOCK_K == 0:
        if REPEATED:
            return tl.load(x_at + start)
        else:
            return tl.load(x_at + start, mask=inside[None, :], other=0.0)
    else:
        return tl.load(x_at + start, mask=inside[None, :] & (start + k < K)[:, None], other=0.0)


@triton.jit
def _scan(acc, x, weight, tokens, rows, inside, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Add weight[rows] @ x[tokens].T to acc [outputs, rows]."""
    k = tl.arange(0, BLOCK_K)
    x_at = x + tokens[None, :] * K + k[:, None]
    w_at = weight + rows[:, None] * K + k[None, :]
    repeated: tl.constexpr = acc.shape[1] > 16  # then repeated reads cost less than masks
    for start in range(0, K, BLOCK_K):
        x_tile = _inputs(x_at, start, k, inside, K, BLOCK_K, repeated)
        if K % BLOCK_K == 0:
            w_tile = tl.load(w_at + start)
        else:
            w_tile = tl.load(w_at + start, mask=(start + k < K)[None, :], other=0.0)
        acc = tl.dot(w_tile, x_tile, acc)
    return acc


@triton.jit
def _store(
    acc,
    bias,
    out,
    pair,
    inside,
    alpha,
    limit,
    N: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
):
    """Add the bias [outputs], activate if GATED, and store the rows of the pairs."""
    OUTPUTS: tl.constexpr = acc.shape[0]
    if bias is not None:
        acc += bias.to(tl.float32)[:, None]
    if GATED:
        both = tl.reshape(acc, [OUTPUTS // 2, 2, acc.shape[1]])
        gate, up = tl.split(tl.permute(both, (0, 2, 1)))
        acc = _activated(gate, up, KIND, alpha, limit)
    size: tl.constexpr = N // 2 if GATED else N
    column = tl.program_id(0) * acc.shape[0] + tl.arange(0, acc.shape[0])
    at = out + pair.to(tl.int64)[None, :] * size + column[:, None]
    mask = inside[None, :] & (column < size)[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["prefetched"])
def expert_gemm_kernel(
    x,
    weight,
    bias,
    out,
    tile_experts,
    tile_rows,
    pairs,
    alpha,
    limit,
    prefetched,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    ORDER: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[pair] = x[pair // TOP_K] @ weight[expert].T + bias[expert], activated if GATED.

    The weight of an expert is [N, K]. The second GEMM of unsorted pairs prefetches `prefetched` bytes
    of each row.
    """
    # The kernel before the second GEMM has waited for the routing before it let this one start.
    if GATED:
        pdl.wait(PDL)
    tile = tl.program_id(1)
    lane = tl.arange(0, ROWS)
    num_rows = 1
    if tile_rows is not None:
        num_rows = tl.load(tile_rows + tile)
        if num_rows == 0:
            return
    expert = tl.load(tile_experts + tile).to(tl.int64)
    inside = lane < num_rows
    pair = tile + lane * 0
    if pairs is not None:
        pair = tl.load(pairs + tile * ROWS + lane, mask=inside, other=0)
    own = _weight_rows(N, OUTPUTS, GATED, ORDER)
    rows = expert * N + own
    if not GATED:
        if tile_rows is None:
            pdl.prefetch(weight + rows * K, (rows * 0 + prefetched).to(tl.int32), PDL)
        pdl.wait(PDL)
    pdl.release(PDL)
    acc = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    tokens = (pair // TOP_K).to(tl.int64)
    acc = _scan(acc, x, weight, tokens, rows, inside, K, BLOCK_K)
    if bias is not None:
        bias = tl.load(bias + rows)
    _store(acc, bias, out, pair, inside, alpha, limit, N, GATED, KIND)


@triton.jit
def combine_kernel(
    rows,
    weights,
    out,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[token] = sum of the rows of its pairs times their weights."""
    pdl.begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = at < SIZE
    total = tl.zeros([WIDTH], dtype=tl.float32)
    for i in tl.static_range(TOP_K):
        pair = token * TOP_K + i
        row = tl.load(rows + pair * SIZE + at, mask=mask, other=0.0)
        total += row.to(tl.float32) * tl.load(weights + pair)
    tl.store(out + token * SIZE + at, total.to(out.dtype.element_ty), mask=mask)
