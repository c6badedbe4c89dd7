"""Quantisation of activations for int8 and fp8 GEMMs.

Kernels store activations with `store_quantised`, as the next GEMM wants them: as e4m3 codes if a program
has the whole row, or as int8 planes if it has whole blocks. Other activations are quantised in a
separate pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.gemm_io import InputQuant, Inputs, PlaneInputs, QuantisedInputs
from windlass.kernels.triton import pdl


@triton.jit
def store_planes(
    value,
    codes,
    scales,
    sums,
    row,
    first,
    K_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Store whole blocks of a row, from input `first` on, as two planes; axis 0 of the grid is all rows.

    Values past the end of the row are 0.
    """
    num_rows = tl.num_programs(0)
    num_blocks: tl.constexpr = value.shape[0] // BLOCK
    groups: tl.constexpr = BLOCK // GROUP
    at = first + tl.arange(0, value.shape[0])
    block = first // BLOCK + tl.arange(0, num_blocks)
    group = block[:, None] * groups + tl.arange(0, groups)[None, :]
    inside = block < K_PAD // BLOCK
    value = tl.reshape(value.to(tl.float32), [num_blocks, groups, GROUP])
    largest = tl.max(tl.max(tl.abs(value), 2), 1)
    scale = largest / 127.0
    inverse = 127.0 / tl.where(largest > 0, largest, 1.0)
    for plane in tl.static_range(2):
        code = tl.floor(value * inverse[:, None, None] + 0.5)
        target = plane * num_rows + row
        stored = tl.reshape(code.to(tl.int8), [num_blocks * BLOCK])
        tl.store(codes + target.to(tl.int64) * K_PAD + at, stored, mask=at < K_PAD)
        tl.store(scales + block * 2 * num_rows + target, scale, mask=inside)
        sum_ = tl.sum(code, 2) * scale[:, None]
        tl.store(sums + group * 2 * num_rows + target, sum_, mask=inside[:, None])
        value -= code * scale[:, None, None]
        scale /= 254.0  # the error is at most half a step
        inverse *= 254.0


@triton.jit
def store_quantised(
    value,
    out,
    scales,
    sums,
    row,
    first,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Store a row, or some of it from input `first` on, as `allocate` chose.

    Without scales it stays as it is. With sums it is rounded to KIND, then stored as planes. Otherwise
    it is the whole row, and becomes e4m3 codes with its largest magnitude at 448.
    """
    if sums is not None:
        k_pad: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK * BLOCK
        store_planes(value.to(KIND), out, scales, sums, row, first, k_pad, BLOCK, GROUP)
    else:
        if scales is not None:
            value = value.to(tl.float32)
            scale = tl.maximum(tl.max(tl.abs(value), 0) / 448.0, 1.1754943508222875e-38)
            tl.store(scales + row, scale)
            value = value / scale
        at = first + tl.arange(0, value.shape[0])
        tl.store(out + row * SIZE + at, value.to(out.dtype.element_ty), mask=at < SIZE)


@dataclass(frozen=True, slots=True)
class Stored:
    """A kernel's result, and the arguments of `store_quantised` for it."""

    result: Inputs
    out: Tensor
    scales: Tensor | None = None
    sums: Tensor | None = None
    block: int = 1
    group: int = 1

    @property
    def is_by_row(self) -> bool:
        """Whether one program must store a whole row."""
        return self.scales is not None and self.sums is None

    def width(self, size: int) -> int:
        """Values of a program that stores `size` of them."""
        return max(triton.next_power_of_2(size), self.block)


def allocate(rows: int, size: int, like: Tensor, input_quant: InputQuant | None) -> Stored:
    """Allocate a kernel's result."""
    if input_quant is None:
        out = like.new_empty((rows, size))
        return Stored(out, out)
    if input_quant.kind == "rows":
        codes = like.new_empty((rows, size), dtype=torch.float8_e4m3fn)
        scales = like.new_empty((rows, 1), dtype=torch.float32)
        return Stored(QuantisedInputs(codes, scales, like.dtype), codes, scales)
    block, group = input_quant.block, input_quant.group
    planes = _allocate_planes(rows, size, like, block, group)
    return Stored(planes, planes.codes, planes.scales, planes.sums, block, group)


def _allocate_planes(rows: int, size: int, like: Tensor, block: int, group: int) -> PlaneInputs:
    blocks = triton.cdiv(size, block)
    return PlaneInputs(
        codes=like.new_empty((2 * rows, blocks * block), dtype=torch.int8),
        scales=like.new_empty((blocks, 2 * rows), dtype=torch.float32),
        sums=like.new_empty((blocks * (block // group), 2 * rows), dtype=torch.float32),
        num_in=size,
        dtype=like.dtype,
    )


@triton.jit
def quantise_rows_kernel(
    x, codes, scales, SIZE: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    value = tl.load(x + row * SIZE + at, mask=at < SIZE, other=0.0)
    store_quantised(value, codes, scales, None, row, 0, x.dtype.element_ty, SIZE, 1, 1)


def quantise_rows(x: Tensor) -> QuantisedInputs:
    """Quantise each row to e4m3 codes with one scale."""
    rows, size = x.shape
    stored = allocate(rows, size, x, InputQuant("rows"))
    assert isinstance(stored.result, QuantisedInputs)
    width = triton.next_power_of_2(size)
    quantise_rows_kernel[(rows,)](
        x,
        stored.out,
        stored.scales,
        SIZE=size,
        WIDTH=width,
        num_warps=min(16, max(1, width // 512)),
        **pdl.options(),
    )
    return stored.result


@triton.jit
def quantise_blocks_kernel(
    x,
    perm,
    codes,
    scales,
    sums,
    K,
    K_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantise one block of one row; with `perm`, input k is read from perm[k]."""
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    at = first + tl.arange(0, BLOCK)
    mask = at < K
    source = at
    if perm is not None:
        source = tl.load(perm + at, mask=mask, other=0)
    value = tl.load(x + row * K + source, mask=mask, other=0.0)
    store_planes(value, codes, scales, sums, row, first, K_PAD, BLOCK, GROUP)


def quantise_blocks(x: Tensor, block: int, group: int, perm: Tensor | None = None) -> PlaneInputs:
    """Quantise rows to planes with one scale per `block` inputs, and sums per `group` inputs."""
    rows, size = x.shape
    planes = _allocate_planes(rows, size, x, block, group)
    num_blocks, _ = planes.scales.shape
    quantise_blocks_kernel[(rows, num_blocks)](
        x,
        perm,
        planes.codes,
        planes.scales,
        planes.sums,
        size,
        K_PAD=num_blocks * block,
        BLOCK=block,
        GROUP=group,
        num_warps=1,
        **pdl.options(),
    )
    return planes
