"""RMSNorm and silu(gate) * up: one row per program, read once, written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.triton import chain


@triton.jit
def rms_norm_kernel(
    x,
    weight,
    out,
    stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain.begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < SIZE
    value = tl.load(x + row * stride + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    normed = (value * scale).to(out.dtype.element_ty)
    tl.store(out + row * SIZE + at, normed * tl.load(weight + at, mask=mask, other=0.0), mask=mask)


@triton.jit
def add_rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """residual += x; out = norm(residual) * weight"""
    chain.begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < SIZE
    value = tl.load(x + row * SIZE + at, mask=mask, other=0.0).to(tl.float32)
    before = tl.load(residual + row * SIZE + at, mask=mask, other=0.0).to(tl.float32)
    total = (value + before).to(residual.dtype.element_ty)
    tl.store(residual + row * SIZE + at, total, mask=mask)
    value = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    normed = (value * scale).to(out.dtype.element_ty)
    tl.store(out + row * SIZE + at, normed * tl.load(weight + at, mask=mask, other=0.0), mask=mask)


@triton.jit
def silu_mul_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    chain.begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + at, mask=mask, other=0.0)
    active = (gate / (1 + tl.exp(-gate))).to(up.dtype)
    tl.store(out + row * SIZE + at, active * up, mask=mask)


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Same contract as `reference.rms_norm`."""
    size = x.shape[-1]
    flat = x.reshape(-1, size)
    out = torch.empty_like(flat)
    block = triton.next_power_of_2(size)
    rms_norm_kernel[(flat.shape[0],)](
        flat,
        weight,
        out,
        flat.stride(0),
        eps,
        SIZE=size,
        BLOCK=block,
        num_warps=_warps(block),
        **chain.options(),
    )
    return out.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Same contract as `reference.add_rms_norm`, but the residual is updated in place."""
    size = x.shape[-1]
    out = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    add_rms_norm_kernel[(x.shape[0],)](
        x,
        residual,
        weight,
        out,
        eps,
        SIZE=size,
        BLOCK=block,
        num_warps=_warps(block),
        **chain.options(),
    )
    return out, residual


def silu_mul(gate_up: Tensor) -> Tensor:
    """Same contract as `reference.silu_mul`."""
    rows, width = gate_up.shape
    size = width // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(size))
    silu_mul_kernel[(rows, triton.cdiv(size, block))](
        gate_up, out, SIZE=size, BLOCK=block, num_warps=4, **chain.options()
    )
    return out
