"""Quantisation of activations for int8 and fp8 GEMMs.

Kernels that compute whole rows store them with `store_quantised`, as the next GEMM wants them. Other
activations are quantised in a separate pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.gemm_io import InputQuant, Inputs, QuantisedInputs
from windlass.kernels.triton import pdl


@triton.jit
def store_quantised(value, out, scales, row, at, mask, SIZE: tl.constexpr):
    """Store a row unchanged (scales None), or as e4m3 codes with its largest magnitude at 448."""
    if scales is not None:
        value = value.to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(value), 0) / 448.0, 1.1754943508222875e-38)
        tl.store(scales + row, scale)
        value = value / scale
    tl.store(out + row * SIZE + at, value.to(out.dtype.element_ty), mask=mask)


def allocate(
    rows: int, size: int, like: Tensor, input_quant: InputQuant | None
) -> tuple[Inputs, Tensor, Tensor | None]:
    """Allocate a kernel's outputs: (result, tensor to store to, scales or None)."""
    if input_quant is None:
        out = like.new_empty((rows, size))
        return out, out, None
    codes = like.new_empty((rows, size), dtype=torch.float8_e4m3fn)
    scales = like.new_empty((rows, 1), dtype=torch.float32)
    return QuantisedInputs(codes, scales, like.dtype), codes, scales


@triton.jit
def quantise_rows_kernel(
    x, codes, scales, SIZE: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    mask = at < SIZE
    value = tl.load(x + row * SIZE + at, mask=mask, other=0.0)
    store_quantised(value, codes, scales, row, at, mask, SIZE)


def quantise_rows(x: Tensor) -> QuantisedInputs:
    """Quantise each row to e4m3 codes with one scale."""
    rows, size = x.shape
    quantised, codes, scales = allocate(rows, size, x, InputQuant("rows"))
    assert isinstance(quantised, QuantisedInputs)
    width = triton.next_power_of_2(size)
    quantise_rows_kernel[(rows,)](
        x,
        codes,
        scales,
        SIZE=size,
        WIDTH=width,
        num_warps=min(16, max(1, width // 512)),
        **pdl.options(),
    )
    return quantised


@dataclass(frozen=True, slots=True)
class Planes:
    """Activations as two int8 planes; the second holds the quantisation error of the first."""

    codes: Tensor  # int8 [2 M, K padded to whole blocks]
    scales: Tensor  # float32 [blocks, 2 M]
    sums: Tensor  # float32 [groups, 2 M]: sums of the dequantised values


@triton.jit
def quantise_blocks_kernel(
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
    """Quantise one block of one row; with `perm`, input k is read from perm[k]."""
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
    largest = tl.max(tl.max(tl.abs(value), 1), 0)
    scale = largest / 127.0
    inverse = tl.where(largest > 0, 127.0 / largest, 0.0)
    group = block * groups + tl.arange(0, groups)
    for plane in tl.static_range(2):
        code = tl.floor(value * inverse + 0.5)
        target = plane * M + row
        tl.store(codes + target.to(tl.int64) * K_PAD + at, code.to(tl.int8))
        tl.store(scales + block * 2 * M + target, scale)
        tl.store(sums + group * 2 * M + target, tl.sum(code, 1) * scale)
        value -= code * scale
        scale /= 254.0  # the error is at most half a step
        inverse *= 254.0


def quantise_blocks(x: Tensor, block: int, group: int, perm: Tensor | None = None) -> Planes:
    """Quantise rows to planes with one scale per `block` inputs, and sums per `group` inputs."""
    rows, size = x.shape
    blocks = triton.cdiv(size, block)
    codes = x.new_empty((2 * rows, blocks * block), dtype=torch.int8)
    scales = x.new_empty((blocks, 2 * rows), dtype=torch.float32)
    sums = x.new_empty((blocks * (block // group), 2 * rows), dtype=torch.float32)
    quantise_blocks_kernel[(rows, blocks)](
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
