"""Products of few rows with a large 16-bit weight, limited by reading the weight.

The weight's rows are the long side of the tile, the tokens the short one, and K is cut into parts
so that small weights fill the device too. The last part to finish adds up all of them in a fixed
order, so the result does not depend on which one that is. A second form computes
silu(gate) * up in the same pass. Both can take their inputs before the norm: the scale of a row is
known when its sum is, after the last product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.triton import chain

MAX_ROWS = 64
_FEW_ROWS = 16
# Bytes of weights that a product fetches before it waits for its inputs: enough to keep the memory
# busy in the gap between kernels, and little enough to stay in the cache.
_FETCHED = 16 * 2**20


def padded(rows: int) -> int:
    """Rows are computed 16 or 64 at a time."""
    return _FEW_ROWS if rows <= _FEW_ROWS else MAX_ROWS


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut: outputs per program, parts of K, and loads under way at once."""

    outputs: int
    splits: int = 1
    stages: int = 4


@triton.jit
def _inputs(source, rows, k, M, K, first, NORMED: tl.constexpr):
    """x[rows, k].T, and with NORMED what the norm does to it but for the scale of each row.

    Returns (inputs [k, rows], the sum of squares of each row). The first program of a launch writes
    the new residual, where the old one is not read any more.
    """
    x, residual, gains, new_residual = source
    at = rows[None, :] * K + k[:, None]
    mask = (rows < M)[None, :]
    tile = tl.load(x + at, mask=mask, other=0.0)
    squares = tl.zeros([rows.shape[0]], dtype=tl.float32)
    if NORMED:
        kind = tile.dtype
        before = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        total = (tile.to(tl.float32) + before).to(kind)
        tl.store(new_residual + at, total, mask=mask & first)
        value = total.to(tl.float32)
        squares = tl.sum(value * value, 0)
        tile = (value * tl.load(gains + k).to(tl.float32)[:, None]).to(kind)
    return tile, squares


@triton.jit
def _product(
    source,
    weight,
    rows,
    outputs,
    begin,
    end,
    M,
    N,
    K,
    first,
    BLOCK_K: tl.constexpr,
    NORMED: tl.constexpr,
):
    """weight[outputs, begin:end] @ x[rows, begin:end].T in float32: [outputs, rows]"""
    k = tl.arange(0, BLOCK_K)
    w_at = weight + outputs.to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros([outputs.shape[0], rows.shape[0]], dtype=tl.float32)
    squares = tl.zeros([rows.shape[0]], dtype=tl.float32)
    for at in range(begin, end, BLOCK_K):
        w_tile = tl.load(w_at + at, mask=(outputs < N)[:, None], other=0.0)
        x_tile, more = _inputs(source, rows, at + k, M, K, first, NORMED)
        acc = tl.dot(w_tile, x_tile, acc)
        squares += more
    return acc, squares


@triton.jit
def _fetch(weight, outputs, begin, count, N, K, CHAINED: tl.constexpr):
    """Ask for `count` values of each output's weights, before they are read."""
    rows = tl.minimum(outputs, N - 1).to(tl.int64)
    num_bytes = (count * 2 + rows * 0).to(tl.int32)
    chain.fetch(weight + rows * K + begin, num_bytes, CHAINED)


@triton.jit(do_not_specialize=["M", "splits", "fetched"])
def skinny_linear_kernel(
    x,
    weight,
    out,
    parts,
    counters,
    residual,
    gains,
    new_residual,
    eps,
    M,
    N,
    K,
    splits,
    fetched,
    NORMED: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """out[M, N] = x[M, K] @ weight[N, K].T; `fetched` values of each row come before the wait."""
    chain.release(CHAINED)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.arange(0, ROWS)
    span = tl.cdiv(K // BLOCK_K, splits) * BLOCK_K
    begin = split * span
    end = tl.minimum(begin + span, K)
    _fetch(weight, outputs, begin, tl.minimum(fetched, end - begin), N, K, CHAINED)
    chain.wait(CHAINED)
    source = (x, residual, gains, new_residual)
    first = tile == 0
    acc, squares = _product(
        source, weight, rows, outputs, begin, end, M, N, K, first, BLOCK_K, NORMED
    )
    if NORMED:
        acc *= tl.rsqrt(squares / K + eps)[None, :]
    at = rows[None, :] * N + outputs[:, None]
    mask = (rows < M)[None, :] & (outputs < N)[:, None]
    if not SPLIT:
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(parts + split * ROWS * N + at, acc, mask=mask)
        tl.debug_barrier()
        done = tl.atomic_add(counters + tile, 1, sem="acq_rel")
        if done == splits - 1:
            total = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
            for part in range(splits):
                total += tl.load(
                    parts + part * ROWS * N + at, mask=mask, other=0.0, cache_modifier=".cg"
                )
            tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)
            tl.store(counters + tile, 0)


@triton.jit(do_not_specialize=["M", "fetched"])
def skinny_gated_kernel(
    x,
    weight,
    out,
    residual,
    gains,
    new_residual,
    eps,
    M,
    N,
    K,
    fetched,
    NORMED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """out[M, N] = silu(x @ gate.T) * (x @ up.T); weight is [2 N, K], the gates first."""
    chain.release(CHAINED)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    _fetch(weight, outputs, 0, tl.minimum(fetched, K), N, K, CHAINED)
    _fetch(weight + N.to(tl.int64) * K, outputs, 0, tl.minimum(fetched, K), N, K, CHAINED)
    chain.wait(CHAINED)
    rows = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    g_at = weight + outputs.to(tl.int64)[:, None] * K + k[None, :]
    u_at = g_at + N.to(tl.int64) * K
    source = (x, residual, gains, new_residual)
    first = tl.program_id(0) == 0
    squares = tl.zeros([ROWS], dtype=tl.float32)
    gate = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    up = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    w_mask = (outputs < N)[:, None]
    for at in range(0, K, BLOCK_K):
        x_tile, more = _inputs(source, rows, at + k, M, K, first, NORMED)
        squares += more
        gate = tl.dot(tl.load(g_at + at, mask=w_mask, other=0.0), x_tile, gate)
        up = tl.dot(tl.load(u_at + at, mask=w_mask, other=0.0), x_tile, up)
    if NORMED:
        scale = tl.rsqrt(squares / K + eps)[None, :]
        gate *= scale
        up *= scale
    kind = out.dtype.element_ty
    # Rounded where the plain version rounds.
    gate = gate.to(kind).to(tl.float32)
    active = (gate / (1 + tl.exp(-gate))).to(kind) * up.to(kind)
    mask = (rows < M)[None, :] & w_mask
    tl.store(out + rows[None, :] * N + outputs[:, None], active, mask=mask)


class Workspace:
    """Where the parts of products meet. Owned by a network; products of one stream share it."""

    def __init__(
        self, device: torch.device, most_outputs: int, few: list[Tiling], many: list[Tiling]
    ) -> None:
        """Room for products of `most_outputs` with the tilings for few and for many rows."""
        rows = max(
            _FEW_ROWS * max(tiling.splits for tiling in few),
            MAX_ROWS * max(tiling.splits for tiling in many),
        )
        self.parts = torch.empty(rows * most_outputs, dtype=torch.float32, device=device)
        self.counters = torch.zeros(most_outputs, dtype=torch.int32, device=device)


def _block_k(size: int) -> int:
    return 128 if size % 128 == 0 else 64


def _ahead(num_rows: int) -> int:
    """How many values of each of so many rows (or parts of rows) are fetched before the wait."""
    return max(64, _FETCHED // 2 // num_rows // 64 * 64)


@dataclass(frozen=True, slots=True)
class Norm:
    """What is left to do to the inputs of a product: add the residual, normalise."""

    residual: Tensor
    gains: Tensor
    eps: float


def linear(
    x: Tensor, weight: Tensor, tiling: Tiling, space: Workspace, norm: Norm | None = None
) -> tuple[Tensor, Tensor]:
    """x @ weight.T for at most MAX_ROWS rows, and the new residual; K must be a multiple of 64.

    With a norm the inputs are normalised on the way, and K cannot be split.
    """
    (rows, size), outputs = x.shape, weight.shape[0]
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    residual = x if norm is None else torch.empty_like(x)
    skinny_linear_kernel[(triton.cdiv(outputs, tiling.outputs), tiling.splits)](
        x,
        weight,
        out,
        space.parts,
        space.counters,
        *_norm_arguments(x, norm, residual),
        rows,
        outputs,
        size,
        tiling.splits,
        _ahead(outputs * tiling.splits),
        NORMED=norm is not None,
        SPLIT=tiling.splits > 1,
        ROWS=padded(rows),
        OUTPUTS=tiling.outputs,
        BLOCK_K=_block_k(size),
        num_warps=4,
        num_stages=tiling.stages,
        **chain.options(),
    )
    return out, residual


def gated(
    x: Tensor, weight: Tensor, tiling: Tiling, norm: Norm | None = None
) -> tuple[Tensor, Tensor]:
    """silu(gate) * up for at most MAX_ROWS rows, and the new residual; K is not split."""
    rows, size = x.shape
    width = weight.shape[0] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    residual = x if norm is None else torch.empty_like(x)
    skinny_gated_kernel[(triton.cdiv(width, tiling.outputs),)](
        x,
        weight,
        out,
        *_norm_arguments(x, norm, residual),
        rows,
        width,
        size,
        _ahead(2 * width),
        NORMED=norm is not None,
        ROWS=padded(rows),
        OUTPUTS=tiling.outputs,
        BLOCK_K=_block_k(size),
        num_warps=4,
        num_stages=tiling.stages,
        **chain.options(),
    )
    return out, residual


def _norm_arguments(
    x: Tensor, norm: Norm | None, new_residual: Tensor
) -> tuple[Tensor, Tensor, Tensor, float]:
    if norm is None:
        return x, x, x, 0.0
    return norm.residual, norm.gains, new_residual, norm.eps
