"""Activations rounded for products of whole numbers or of 8-bit floats: one pass over each row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.triton import chain


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows as two planes of int8 codes with a scale for each block, and sums that minima need.

    The second plane stands for what the first leaves of each value.
    """

    codes: Tensor  # int8 [2 M, K rounded up to whole blocks]
    scales: Tensor  # float32 [blocks, 2 M]
    sums: Tensor  # float32 [groups, 2 M]: of what the codes stand for


@triton.jit
def round_blocks_kernel(
    x,
    order,
    codes,
    scales,
    sums,
    M,
    K,
    K_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    ORDERED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One row and one block; input k comes from order[k] where the weights lie in another order."""
    chain.begin(CHAINED)
    row = tl.program_id(0)
    block = tl.program_id(1)
    groups: tl.constexpr = BLOCK // GROUP
    at = block * BLOCK + tl.arange(0, groups)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = at < K
    source = at
    if ORDERED:
        source = tl.load(order + at, mask=mask, other=0)
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


def round_blocks(x: Tensor, block: int, group: int, order: Tensor | None = None) -> Blocks:
    """Rows in blocks of `block` inputs, with sums over each `group` of them."""
    rows, size = x.shape
    blocks = triton.cdiv(size, block)
    codes = torch.empty((2 * rows, blocks * block), dtype=torch.int8, device=x.device)
    scales = torch.empty((blocks, 2 * rows), dtype=torch.float32, device=x.device)
    sums = torch.empty((blocks * (block // group), 2 * rows), dtype=torch.float32, device=x.device)
    round_blocks_kernel[(rows, blocks)](
        x,
        x if order is None else order,
        codes,
        scales,
        sums,
        rows,
        size,
        K_PAD=blocks * block,
        BLOCK=block,
        GROUP=group,
        ORDERED=order is not None,
        num_warps=1,
        **chain.options(),
    )
    return Blocks(codes, scales, sums)


@triton.jit
def round_rows_kernel(
    x, codes, scales, most_code, SIZE: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):
    """One row with one scale, so that its largest value becomes `most_code`."""
    chain.begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < SIZE
    value = tl.load(x + row * SIZE + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0) / most_code, 1.1754943508222875e-38)
    tl.store(codes + row * SIZE + at, (value / scale).to(codes.dtype.element_ty), mask=mask)
    tl.store(scales + row, scale)


def round_rows(x: Tensor, most_code: float = 448.0) -> tuple[Tensor, Tensor]:
    """Rows as e4m3 codes [M, K], and their scales [M, 1]."""
    rows, size = x.shape
    codes = torch.empty((rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    round_rows_kernel[(rows,)](
        x,
        codes,
        scales,
        most_code,
        SIZE=size,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **chain.options(),
    )
    return codes, scales
