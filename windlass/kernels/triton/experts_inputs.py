"""Quantisation of the inputs of fp8 experts to e4m3.

Weights with a scale per row multiply inputs with one scale per token, so that a sum over K is scaled
once. Weights with a scale per block multiply inputs with a scale per token and 128 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.triton import pdl

BLOCK = 128  # inputs with one scale
CHUNK = 1024  # values that a program quantises per iteration


@triton.jit
def e4m3_scale(largest):
    """The scale of values up to `largest`, which become at most 448."""
    return tl.maximum(largest / 448.0, 1.1754943508222875e-38)


@triton.jit
def quantise_row(
    x,
    codes,
    scales,
    row,
    M,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Quantise one of M rows; with BLOCKS the scales are [blocks, M], else [M]."""
    at = tl.arange(0, CHUNK)
    scale = 1.0
    if not BLOCKS:
        largest = tl.zeros([CHUNK], dtype=tl.float32)
        for start in range(0, K, CHUNK):
            value = tl.load(x + row * K + start + at, mask=start + at < K, other=0.0)
            largest = tl.maximum(largest, tl.abs(value.to(tl.float32)))
        scale = e4m3_scale(tl.max(largest, 0))
        tl.store(scales + row, scale)
    for start in range(0, K, CHUNK):
        value = tl.load(x + row * K + start + at, mask=start + at < K, other=0.0).to(tl.float32)
        if BLOCKS:
            parts = tl.reshape(value, [CHUNK // 128, 128])
            part_scales = e4m3_scale(tl.max(tl.abs(parts), 1))
            block = start // 128 + tl.arange(0, CHUNK // 128)
            tl.store(scales + block.to(tl.int64) * M + row, part_scales, mask=block * 128 < K)
            value = tl.reshape(parts / part_scales[:, None], [CHUNK])
        else:
            value = value / scale
        tl.store(codes + row * K + start + at, value.to(tl.float8e4nv), mask=start + at < K)


@triton.jit(do_not_specialize=["M"])
def quantise_inputs_kernel(
    x,
    codes,
    scales,
    M,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantise one row."""
    pdl.begin(PDL)
    quantise_row(x, codes, scales, tl.program_id(0).to(tl.int64), M, K, BLOCKS, CHUNK)


@dataclass(frozen=True, slots=True)
class ExpertInputs:
    """Inputs of a grouped GEMM: 16-bit, or e4m3 codes with scales."""

    values: Tensor  # [rows, K]
    scales: Tensor | None = None  # float32 [blocks, rows]; one block: a scale per row
    blocks: bool = False  # scales per 128 inputs


def empty_codes(x: Tensor, blocks: bool) -> ExpertInputs:
    """Memory for the codes and scales of x."""
    rows, size = x.shape
    count = triton.cdiv(size, BLOCK) if blocks else 1
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    return ExpertInputs(codes, x.new_empty((count, rows), dtype=torch.float32), blocks)


def quantise_inputs(x: Tensor, blocks: bool) -> ExpertInputs:
    """Quantise the rows of x, with one scale, or with one per 128 inputs."""
    quantised = empty_codes(x, blocks)
    quantise_inputs_kernel[(x.shape[0],)](
        x,
        quantised.values,
        quantised.scales,
        x.shape[0],
        K=x.shape[1],
        BLOCKS=blocks,
        CHUNK=CHUNK,
        num_warps=1,
        **pdl.options(),
    )
    return quantised
