"""Skinny GEMMs: few rows with a large 16-bit weight, limited by weight bandwidth.

The weight's rows are the long side of the tile, the tokens the short one. K may be split, so that
small weights also fill the device. The last program to finish adds all splits in a fixed order, so
the result does not depend on which program that is. A second kernel computes silu(gate) * up in one
pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.storages import Held, held
from windlass.kernels.triton import pdl
from windlass.kernels.triton.fit import fit
from windlass.kernels.triton.reduce import add_splits

MAX_ROWS = 64
_FEW_ROWS = 16
# Bytes of weights that a GEMM prefetches before it waits for its inputs: enough to keep the memory
# busy in the gap between kernels, and few enough to stay in the L2 cache.
_PREFETCH_BYTES = 8 * 2**20


def padded(rows: int) -> int:
    """Rows of the kernel's tile: 16 or 64."""
    return _FEW_ROWS if rows <= _FEW_ROWS else MAX_ROWS


@dataclass(frozen=True, slots=True)
class Tiling:
    """Outputs per program, splits of K, and pipeline stages of a skinny GEMM.

    Without stages, it is a GEMM of one row that reads whole rows of the weight (gemv.py).
    """

    outputs: int
    splits: int = 1
    stages: int = 4

    @property
    def whole_rows(self) -> bool:
        return self.stages == 0


@triton.jit
def _gemm(x, weight, rows, outputs, begin, end, M, N, K, BLOCK_K: tl.constexpr):
    """weight[outputs, begin:end] @ x[rows, begin:end].T in float32: [outputs, rows]"""
    k = tl.arange(0, BLOCK_K)
    w_at = weight + outputs.to(tl.int64)[:, None] * K + k[None, :]
    x_at = x + rows[None, :] * K + k[:, None]
    acc = tl.zeros([outputs.shape[0], rows.shape[0]], dtype=tl.float32)
    for at in range(begin, end, BLOCK_K):
        w_tile = tl.load(w_at + at, mask=(outputs < N)[:, None], other=0.0)
        x_tile = tl.load(x_at + at, mask=(rows < M)[None, :], other=0.0)
        acc = tl.dot(w_tile, x_tile, acc)
    return acc


@triton.jit
def _prefetch(weight, outputs, begin, count, N, K, PDL: tl.constexpr):
    """Prefetch `count` values of each output's weights."""
    rows = tl.minimum(outputs, N - 1).to(tl.int64)
    num_bytes = (count * 2 + rows * 0).to(tl.int32)
    pdl.prefetch(weight + rows * K + begin, num_bytes, PDL)


@triton.jit(do_not_specialize=["M", "splits", "prefetched"])
def skinny_linear_kernel(
    x,
    weight,
    out,
    partial_sums,
    counters,
    M,
    N,
    K,
    splits,
    prefetched,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[M, N] = x[M, K] @ weight[N, K].T; `prefetched` values of each row are prefetched."""
    pdl.release(PDL)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.arange(0, ROWS)
    span = tl.cdiv(K // BLOCK_K, splits) * BLOCK_K
    begin = split * span
    end = tl.minimum(begin + span, K)
    _prefetch(weight, outputs, begin, tl.minimum(prefetched, end - begin), N, K, PDL)
    pdl.wait(PDL)
    acc = _gemm(x, weight, rows, outputs, begin, end, M, N, K, BLOCK_K)
    at = rows[None, :] * N + outputs[:, None]
    mask = (rows < M)[None, :] & (outputs < N)[:, None]
    complete = True
    if SPLIT:
        acc, complete = add_splits(
            acc, partial_sums, ROWS * N, counters + tile, split, splits, at, mask
        )
    if complete:
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "prefetched"])
def skinny_gated_kernel(
    x,
    weight,
    out,
    M,
    N,
    K,
    prefetched,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[M, N] = silu(x @ gate.T) * (x @ up.T); weight is [2 N, K], gate rows first."""
    pdl.release(PDL)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    _prefetch(weight, outputs, 0, tl.minimum(prefetched, K), N, K, PDL)
    _prefetch(weight + N.to(tl.int64) * K, outputs, 0, tl.minimum(prefetched, K), N, K, PDL)
    pdl.wait(PDL)
    rows = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    g_at = weight + outputs.to(tl.int64)[:, None] * K + k[None, :]
    u_at = g_at + N.to(tl.int64) * K
    x_at = x + rows[None, :] * K + k[:, None]
    gate = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    up = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    w_mask = (outputs < N)[:, None]
    for at in range(0, K, BLOCK_K):
        x_tile = tl.load(x_at + at, mask=(rows < M)[None, :], other=0.0)
        gate = tl.dot(tl.load(g_at + at, mask=w_mask, other=0.0), x_tile, gate)
        up = tl.dot(tl.load(u_at + at, mask=w_mask, other=0.0), x_tile, up)
    kind = out.dtype.element_ty
    # Round where the reference implementation rounds.
    gate = gate.to(kind).to(tl.float32)
    active = (gate / (1 + tl.exp(-gate))).to(kind) * up.to(kind)
    mask = (rows < M)[None, :] & w_mask
    tl.store(out + rows[None, :] * N + outputs[:, None], active, mask=mask)


class Workspace:
    """Workspace of split-K sums. Owned by a network; GEMMs on one stream share it."""

    def __init__(
        self, device: torch.device, max_outputs: int, few: list[Tiling], many: list[Tiling]
    ) -> None:
        """Allocate for GEMMs of up to `max_outputs` with the tilings for few and for many rows."""
        rows = max(
            _FEW_ROWS * max(tiling.splits for tiling in few),
            MAX_ROWS * max(tiling.splits for tiling in many),
        )
        self.partial_sums = torch.empty(rows * max_outputs, dtype=torch.float32, device=device)
        self.counters = torch.zeros(max_outputs, dtype=torch.int32, device=device)

    def storages(self) -> Iterator[Held]:
        return held("tables", self.partial_sums, self.counters)


def _block_k(size: int) -> int:
    return 128 if size % 128 == 0 else 64


def _prefetched(num_rows: int) -> int:
    """Values that are prefetched of each of `num_rows` rows (or splits of rows)."""
    return max(64, _PREFETCH_BYTES // 2 // num_rows // 64 * 64)


def linear(x: Tensor, weight: Tensor, tiling: Tiling, space: Workspace) -> Tensor:
    """x @ weight.T for at most MAX_ROWS rows; K must be a multiple of 64."""
    (rows, size), outputs = x.shape, weight.shape[0]
    out = x.new_empty((rows, outputs))
    fit(skinny_linear_kernel)[(triton.cdiv(outputs, tiling.outputs), tiling.splits)](
        x,
        weight,
        out,
        space.partial_sums,
        space.counters,
        rows,
        outputs,
        size,
        tiling.splits,
        _prefetched(outputs * tiling.splits),
        SPLIT=tiling.splits > 1,
        ROWS=padded(rows),
        OUTPUTS=tiling.outputs,
        BLOCK_K=_block_k(size),
        num_warps=4,
        num_stages=tiling.stages,
        **pdl.options(),
    )
    return out


def gated(x: Tensor, weight: Tensor, tiling: Tiling) -> Tensor:
    """silu(gate) * up for at most MAX_ROWS rows; K is not split."""
    rows, size = x.shape
    width = weight.shape[0] // 2
    out = x.new_empty((rows, width))
    fit(skinny_gated_kernel)[(triton.cdiv(width, tiling.outputs),)](
        x,
        weight,
        out,
        rows,
        width,
        size,
        _prefetched(2 * width),
        ROWS=padded(rows),
        OUTPUTS=tiling.outputs,
        BLOCK_K=_block_k(size),
        num_warps=4,
        num_stages=tiling.stages,
        **pdl.options(),
    )
    return out
