"""GEMMs of one row: every program reads whole rows of the weight into registers.

The weight does not depend on the kernel before, so it is on its way before that kernel ends (pdl.py); what
follows is one load of the input, one sum and one store. Inputs stay in 16 bits, also for fp8 weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.gemm_io import UnnormalisedInputs
from windlass.kernels.triton import deferred_norm, pdl
from windlass.kernels.triton.deferred_norm import RowInputs, add_to_residual, normalised
from windlass.kernels.triton.fp8_kernels import load_tile

MAX_SIZE = 16384  # inputs
MAX_VALUES = 65536  # of the weight per program, which are in registers
_THREAD_VALUES = 8  # of one row of the weight, per thread and load


@triton.jit(do_not_specialize=["tiles"])
def gemv_kernel(
    x,
    gains,
    squares,
    eps,
    tiles,
    weight,
    scales,
    out,
    out_squares,
    N,
    K,
    TILES: tl.constexpr,
    GATED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[N] = weight[N, K] @ x[K]; GATED: silu(gate @ x) * (up @ x), the weight is [2 N, K].

    `scales`: of the outputs. With `squares`, x is the residual stream before its norm; with `out_squares`,
    out is the residual stream to add to. EVEN: OUTPUTS divides N, and WIDTH is K.
    """
    pdl.release(PDL)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = outputs < N
    k = tl.arange(0, WIDTH)
    if scales is not None:
        k = tl.max_contiguous(k, 8)  # threads load as many codes as values of x: the same columns
    k = k[None, :]
    mask = inside[:, None] & (k < K)
    at = weight + outputs.to(tl.int64)[:, None] * K + k
    w_tile = load_tile(at, mask, EVEN)
    if GATED:
        u_tile = load_tile(at + N.to(tl.int64) * K, mask, EVEN)
    if scales is not None:
        w_scales = tl.load(scales + outputs, mask=inside, other=0.0)
        if GATED:
            u_scales = tl.load(scales + N + outputs, mask=inside, other=0.0)
    if squares is not None:
        gain = load_tile(gains + k, k < K, EVEN)
    pdl.wait(PDL)
    x_tile = load_tile(x + k, k < K, EVEN)
    if out_squares is not None:
        before = tl.load(out + outputs, mask=inside, other=0.0)
    if squares is not None:
        x_tile = normalised(x_tile, gain, squares, eps, tiles, K, TILES)
    else:
        x_tile = x_tile.to(tl.float32)
    kind = out.dtype.element_ty
    acc = tl.sum(w_tile.to(tl.float32) * x_tile, 1)
    if GATED:
        up = tl.sum(u_tile.to(tl.float32) * x_tile, 1)
    if scales is not None:
        acc *= w_scales
        if GATED:
            up *= u_scales
    if GATED:
        # Round where the reference implementation rounds.
        gate = acc.to(kind).to(tl.float32)
        acc = (gate / (1 + tl.exp(-gate))).to(kind) * up.to(kind)
    if out_squares is not None:
        add_to_residual(acc, before, outputs, inside, out, out_squares)
    else:
        tl.store(out + outputs, acc.to(kind), mask=inside)


def linear(x: RowInputs, weight: Tensor, outputs: int, scales: Tensor | None = None) -> Tensor:
    """x @ weight.T, with so many outputs per program; `scales`: of the outputs."""
    out = torch.empty((1, weight.shape[0]), dtype=x.dtype, device=weight.device)
    _launch(x, weight, outputs, scales, out)
    return out


def gated(x: RowInputs, weight: Tensor, outputs: int, scales: Tensor | None = None) -> Tensor:
    """silu(gate) * up"""
    out = torch.empty((1, weight.shape[0] // 2), dtype=x.dtype, device=weight.device)
    _launch(x, weight, outputs, scales, out, gated=True)
    return out


def linear_residual(x: RowInputs, weight: Tensor, outputs: int, into: UnnormalisedInputs) -> None:
    """Add x @ weight.T to the residual stream of `into`, and store the sums of squares there."""
    _launch(x, weight, outputs, None, into.residual, into.squares)


def _launch(
    x: RowInputs,
    weight: Tensor,
    outputs: int,
    scales: Tensor | None,
    out: Tensor,
    out_squares: Tensor | None = None,
    *,
    gated: bool = False,
) -> None:
    row, norm = deferred_norm.arguments(x)
    num_out, size = out.shape[1], weight.shape[1]
    width = triton.next_power_of_2(size)
    gemv_kernel[(triton.cdiv(num_out, outputs),)](
        row,
        *norm,
        weight,
        scales,
        out,
        out_squares,
        num_out,
        size,
        TILES=triton.next_power_of_2(norm.tiles),
        GATED=gated,
        OUTPUTS=outputs,
        WIDTH=width,
        EVEN=width == size and num_out % outputs == 0,
        num_warps=min(16, max(1, width // (32 * _THREAD_VALUES))),
        **pdl.options(),
    )
