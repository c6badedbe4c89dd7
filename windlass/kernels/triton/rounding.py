"""Activations rounded for products of whole numbers or of 8-bit floats.

Kernels that make whole rows store them through `store_rounded`, as the next product wants them; what
nobody rounded yet is rounded here, in a pass of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.rounded import Inputs, Rounded, Rounding
from windlass.kernels.triton import pdl


@triton.jit
def store_rounded(value, out, scales, row, at, mask, SIZE: tl.constexpr):
    """A whole row, as it is (scales None) or as e4m3 codes with its largest magnitude at 448."""
    if scales is not None:
        value = value.to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(value), 0) / 448.0, 1.1754943508222875e-38)
        tl.store(scales + row, scale)
        value = value / scale
    tl.store(out + row * SIZE + at, value.to(out.dtype.element_ty), mask=mask)


def room(
    rows: int, size: int, like: Tensor, rounding: Rounding | None
) -> tuple[Inputs, Tensor, Tensor | None]:
    """Rows of a size to be filled: what they will be, where to store them, and their scales."""
    if rounding is None:
        plain = like.new_empty((rows, size))
        return plain, plain, None
    codes = like.new_empty((rows, size), dtype=torch.float8_e4m3fn)
    scales = like.new_empty((rows, 1), dtype=torch.float32)
    return Rounded(codes, scales, like.dtype), codes, scales


@triton.jit
def round_rows_kernel(x, codes, scales, SIZE: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr):
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    mask = at < SIZE
    value = tl.load(x + row * SIZE + at, mask=mask, other=0.0)
    store_rounded(value, codes, scales, row, at, mask, SIZE)


def round_rows(x: Tensor) -> Rounded:
    """Each row as e4m3 codes and a scale."""
    rows, size = x.shape
    rounded, codes, scales = room(rows, size, x, Rounding("rows"))
    assert isinstance(rounded, Rounded)
    width = triton.next_power_of_2(size)
    round_rows_kernel[(rows,)](
        x,
        codes,
        scales,
        SIZE=size,
        WIDTH=width,
        num_warps=min(16, max(1, width // 512)),
        **pdl.options(),
    )
    return rounded


@dataclass(frozen=True, slots=True)
class Planes:
    """Rows of inputs as two planes of int8, the second one what the first leaves of each value."""

    codes: Tensor  # int8 [2 M, K rounded up to whole blocks]
    scales: Tensor  # float32 [blocks, 2 M]
    sums: Tensor  # float32 [groups, 2 M]: of what the codes stand for


@triton.jit
def round_blocks_kernel(
    x,
    perm,
    codes,
    scales,
    sums,
    M,
    K,
    K_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row and one block; input k comes from order[k] where the weights lie in another order."""
    pdl.begin(PDL)
    row = tl.program_id(0)
    block = tl.program_id(1)
    groups: tl.constexpr = BLOCK // GROUP
    at = block * BLOCK + tl.arange(0, groups)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = at < K
    source = at
    if perm is not None:
        source = tl.load(perm + at, mask=mask, other=0)
    value = tl.load(x + row.to(tl.int64) * K + source, mask=mask, other=0.0).to(tl.float32)
    most = tl.max(tl.max(tl.abs(value), 1), 0)
    scale = most / 127.0
    inverse = tl.where(most > 0, 127.0 / most, 0.0)
    group = block * groups + tl.arange(0, groups)
    for plane in tl.static_range(2):
        rounded = tl.floor(value * inverse + 0.5)
        target = plane * M + row
        tl.store(codes + target.to(tl.int64) * K_PAD + at, rounded.to(tl.int8))
        tl.store(scales + block * 2 * M + target, scale)
        tl.store(sums + group * 2 * M + target, tl.sum(rounded, 1) * scale)
        value -= rounded * scale
        scale /= 254.0  # at most half of a step is left
        inverse *= 254.0


def round_blocks(x: Tensor, block: int, group: int, perm: Tensor | None = None) -> Planes:
    """Rows as planes with a scale for `block` inputs, and sums over each `group` of them."""
    rows, size = x.shape
    blocks = triton.cdiv(size, block)
    codes = x.new_empty((2 * rows, blocks * block), dtype=torch.int8)
    scales = x.new_empty((blocks, 2 * rows), dtype=torch.float32)
    sums = x.new_empty((blocks * (block // group), 2 * rows), dtype=torch.float32)
    round_blocks_kernel[(rows, blocks)](
        x,
        perm,
        codes,
        scales,
        sums,
        rows,
        size,
        K_PAD=blocks * block,
        BLOCK=block,
        GROUP=group,
        num_warps=1,
        **pdl.options(),
    )
    return Planes(codes, scales, sums)
