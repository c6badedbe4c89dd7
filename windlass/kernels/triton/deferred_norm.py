"""RMS norms between two GEMMs of one row, without a kernel of their own.

The first GEMM adds its outputs to the residual stream, and stores the sum of squares of every tile. All
programs of the second one normalise its inputs as they read them, with the roundings of the norm's kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.gemm_io import UnnormalisedInputs

RowInputs = Tensor | UnnormalisedInputs


@triton.jit
def add_to_residual(acc, before, at, mask, residual, squares):
    """residual = before + acc; squares = those of this tile. `acc` is 0 outside of the mask."""
    kind = residual.dtype.element_ty
    total = (acc.to(kind).to(tl.float32) + before.to(tl.float32)).to(kind)
    tl.store(residual + at, total, mask=mask)
    wide = tl.ravel(total.to(tl.float32))
    tl.store(squares + tl.program_id(0), tl.sum(wide * wide, 0))


@triton.jit
def normalised(x, gains, squares, eps, tiles, K, TILES: tl.constexpr):
    """RMS norm of the residual stream, times the gains, in float32."""
    tile = tl.arange(0, TILES)
    total = tl.sum(tl.load(squares + tile, mask=tile < tiles, other=0.0), 0)
    wide = x.to(tl.float32) * tl.rsqrt(total / K + eps)
    return (wide.to(gains.dtype) * gains).to(x.dtype).to(tl.float32)


def allocate(residual: Tensor, outputs: int, weight: Tensor, eps: float) -> UnnormalisedInputs:
    """What a GEMM with so many outputs per program leaves to the next one."""
    tiles = triton.cdiv(residual.shape[1], outputs)
    squares = torch.empty(tiles, dtype=torch.float32, device=residual.device)
    return UnnormalisedInputs(residual, squares, weight, eps)


class Norm(NamedTuple):
    """A kernel's arguments for the norm of its inputs; by default, there is none."""

    gains: Tensor | None = None
    squares: Tensor | None = None
    eps: float = 0.0
    tiles: int = 1


def arguments(x: RowInputs) -> tuple[Tensor, Norm]:
    """The row that a kernel reads, and its norm."""
    if isinstance(x, UnnormalisedInputs):
        return x.residual, Norm(x.weight, x.squares, x.eps, x.squares.shape[0])
    return x, Norm()
