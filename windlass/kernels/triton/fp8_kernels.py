"""The kernels of fp8_linear.py: e4m3 x e4m3 GEMMs for few rows, limited by weight bandwidth.

The tiling is that of skinny.py. Inputs are either quantised with one scale per row, or 16-bit. 16-bit
inputs are quantised here with one scale per row and block, which is finer and costs slightly more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from windlass.kernels.triton import pdl
from windlass.kernels.triton.reduce import add_splits


@triton.jit
def _prefetch(codes, outputs, begin, count, N, K, PDL: tl.constexpr):
    """Prefetch `count` bytes of each output's weights."""
    at = tl.minimum(outputs, N - 1).to(tl.int64) * K + begin
    pdl.prefetch(codes + at, (at * 0 + tl.maximum(count, 0)).to(tl.int32), PDL)


@triton.jit
def _quantised(x_tile):
    """Quantise the columns of a tile [K, rows]: (codes, scales)."""
    wide = x_tile.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(wide), 0), 1e-30)
    return (wide * (448.0 / largest)[None, :]).to(tl.float8e4nv), largest / 448.0


@triton.jit
def load_tile(at, mask, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["M", "splits", "prefetched"])
def fp8_linear_kernel(
    x,
    x_scales,
    codes,
    scales,
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
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[M, N] = x[M, K] @ weight[N, K].T; `prefetched` bytes of each row are prefetched.

    EVEN: blocks divide N and K.
    """
    pdl.release(PDL)
    tile, split = tl.program_id(0), tl.program_id(1)
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.arange(0, ROWS)
    span = tl.cdiv(tl.cdiv(K, BLOCK_K), splits) * BLOCK_K
    begin = split * span
    end = tl.minimum(begin + span, K)
    _prefetch(codes, outputs, begin, tl.minimum(prefetched, end - begin), N, K, PDL)
    pdl.wait(PDL)
    k = tl.arange(0, BLOCK_K)
    w_at = codes + outputs.to(tl.int64)[:, None] * K + k[None, :]
    x_at = x + rows[None, :] * K + k[:, None]
    acc = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    for start in range(begin, end, BLOCK_K):
        inside = start + k < K
        w_tile = load_tile(w_at + start, (outputs < N)[:, None] & inside[None, :], EVEN)
        x_mask = (rows < M)[None, :] if EVEN else (rows < M)[None, :] & inside[:, None]
        x_tile = tl.load(x_at + start, mask=x_mask, other=0.0)
        if x_scales is None:
            x_codes, x_scale = _quantised(x_tile)
            acc += tl.dot(w_tile, x_codes) * x_scale[None, :]
        else:
            acc = tl.dot(w_tile, x_tile, acc)
    at = rows[None, :] * N + outputs[:, None]
    mask = (rows < M)[None, :] & (outputs < N)[:, None]
    complete = True
    if SPLIT:
        acc, complete = add_splits(
            acc, partial_sums, ROWS * N, counters + tile, split, splits, at, mask
        )
    if complete:
        acc *= tl.load(scales + outputs, mask=outputs < N, other=0.0)[:, None]
        if x_scales is not None:
            acc *= tl.load(x_scales + rows, mask=rows < M, other=0.0)[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "prefetched"])
def fp8_gated_kernel(
    x,
    x_scales,
    codes,
    scales,
    out,
    M,
    N,
    K,
    prefetched,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[M, N] = silu(x @ gate.T) * (x @ up.T); the weight is [2 N, K], gate rows first."""
    pdl.release(PDL)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.arange(0, ROWS)
    ups = codes + N.to(tl.int64) * K
    _prefetch(codes, outputs, 0, tl.minimum(prefetched, K), N, K, PDL)
    _prefetch(ups, outputs, 0, tl.minimum(prefetched, K), N, K, PDL)
    pdl.wait(PDL)
    k = tl.arange(0, BLOCK_K)
    w_at = outputs.to(tl.int64)[:, None] * K + k[None, :]
    x_at = x + rows[None, :] * K + k[:, None]
    gate = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    up = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = start + k < K
        w_mask = (outputs < N)[:, None] & inside[None, :]
        x_mask = (rows < M)[None, :] if EVEN else (rows < M)[None, :] & inside[:, None]
        x_tile = tl.load(x_at + start, mask=x_mask, other=0.0)
        g_tile = load_tile(codes + w_at + start, w_mask, EVEN)
        u_tile = load_tile(ups + w_at + start, w_mask, EVEN)
        if x_scales is None:
            x_codes, x_scale = _quantised(x_tile)
            gate += tl.dot(g_tile, x_codes) * x_scale[None, :]
            up += tl.dot(u_tile, x_codes) * x_scale[None, :]
        else:
            gate = tl.dot(g_tile, x_tile, gate)
            up = tl.dot(u_tile, x_tile, up)
    gate *= tl.load(scales + outputs, mask=outputs < N, other=0.0)[:, None]
    up *= tl.load(scales + N + outputs, mask=outputs < N, other=0.0)[:, None]
    if x_scales is not None:
        x_scale = tl.load(x_scales + rows, mask=rows < M, other=0.0)[None, :]
        gate *= x_scale
        up *= x_scale
    kind = out.dtype.element_ty
    gate = gate.to(kind).to(tl.float32)  # round where the reference implementation rounds
    active = (gate / (1 + tl.exp(-gate))).to(kind) * up.to(kind)
    mask = (rows < M)[None, :] & (outputs < N)[:, None]
    tl.store(out + rows[None, :] * N + outputs[:, None], active, mask=mask)
