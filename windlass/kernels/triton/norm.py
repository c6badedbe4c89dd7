"""RMSNorm and silu(gate) * up: one row per program, read once, written once.

What comes in may be a product whose scales are still to be multiplied in, and what goes out may be
rounded for the product that follows (rounded.py): both are free here.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.rounded import Inputs, Outputs, Rounding, Scaled
from windlass.kernels.triton import pdl
from windlass.kernels.triton.rounding import room, store_rounded

_COLUMNS = 1024  # that one program computes where it need not have all


@triton.jit
def scaled(value, rows, columns, row, column, mask):
    """Values of a product in float32, times the scales that it came without (None: it has them)."""
    value = value.to(tl.float32)
    if rows is not None:
        value *= tl.load(rows + row) * tl.load(columns + column, mask=mask, other=0.0)
    return value


@triton.jit
def normed(value, gain, eps, SIZE: tl.constexpr):
    """A row in float32, scaled to unit root mean square, times the gains."""
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    return (value * scale).to(gain.dtype) * gain


@triton.jit
def rms_norm_kernel(
    x,
    weight,
    out,
    out_scales,
    stride,
    eps,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    mask = at < SIZE
    value = tl.load(x + row * stride + at, mask=mask, other=0.0).to(tl.float32)
    gain = tl.load(weight + at, mask=mask, other=0.0)
    store_rounded(normed(value, gain, eps, SIZE), out, out_scales, row, at, mask, SIZE)


@triton.jit
def add_rms_norm_kernel(
    x,
    x_rows,
    x_columns,
    residual,
    weight,
    out,
    out_scales,
    eps,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """residual += x; out = norm(residual) * weight"""
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    mask = at < SIZE
    value = tl.load(x + row * SIZE + at, mask=mask, other=0.0)
    value = scaled(value, x_rows, x_columns, row, at, mask)
    before = tl.load(residual + row * SIZE + at, mask=mask, other=0.0).to(tl.float32)
    total = (value + before).to(residual.dtype.element_ty)
    tl.store(residual + row * SIZE + at, total, mask=mask)
    value = total.to(tl.float32)
    gain = tl.load(weight + at, mask=mask, other=0.0)
    store_rounded(normed(value, gain, eps, SIZE), out, out_scales, row, at, mask, SIZE)


@triton.jit
def silu_mul_kernel(
    gate_up,
    rows,
    columns,
    out,
    out_scales,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """WIDTH columns of a row; all of them where they share a scale."""
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = at < SIZE
    kind = gate_up.dtype.element_ty
    gate = tl.load(gate_up + row * 2 * SIZE + at, mask=mask, other=0.0)
    gate = scaled(gate, rows, columns, row, at, mask)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + at, mask=mask, other=0.0)
    if rows is not None:
        up = scaled(up, rows, columns, row, SIZE + at, mask).to(kind)
    active = (gate / (1 + tl.exp(-gate))).to(kind)
    store_rounded(active * up, out, out_scales, row, at, mask, SIZE)


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


def parts(x: Outputs) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Values, and the scales of their rows and columns if they are to be multiplied in."""
    return (x.values, x.rows, x.columns) if isinstance(x, Scaled) else (x, None, None)


def rms_norm(x: Tensor, weight: Tensor, eps: float, rounding: Rounding | None = None) -> Inputs:
    """Same contract as `reference.rms_norm`."""
    size = x.shape[-1]
    flat = x.reshape(-1, size)
    result, out, out_scales = room(flat.shape[0], size, flat, rounding)
    width = triton.next_power_of_2(size)
    rms_norm_kernel[(flat.shape[0],)](
        flat,
        weight,
        out,
        out_scales,
        flat.stride(0),
        eps,
        SIZE=size,
        WIDTH=width,
        num_warps=_warps(width),
        **pdl.options(),
    )
    return result.view(x.shape) if isinstance(result, Tensor) else result


def add_rms_norm(
    x: Outputs, residual: Tensor, weight: Tensor, eps: float, rounding: Rounding | None = None
) -> tuple[Inputs, Tensor]:
    """Same contract as `reference.add_rms_norm`, but the residual is updated in place."""
    values, rows, columns = parts(x)
    size = values.shape[-1]
    result, out, out_scales = room(values.shape[0], size, values, rounding)
    width = triton.next_power_of_2(size)
    add_rms_norm_kernel[(values.shape[0],)](
        values,
        rows,
        columns,
        residual,
        weight,
        out,
        out_scales,
        eps,
        SIZE=size,
        WIDTH=width,
        num_warps=_warps(width),
        **pdl.options(),
    )
    return result, residual


def _silu_options(whole_rows: bool, is_raw: bool) -> dict[str, int]:
    """A long row at once is many values for each thread, and two programs overlap if both fit in."""
    if not whole_rows:
        return {"num_warps": 4}
    return {"num_warps": 16} if is_raw else {"num_warps": 16, "maxnreg": 64}


def silu_mul(gate_up: Outputs, rounding: Rounding | None = None) -> Inputs:
    """Same contract as `reference.silu_mul`."""
    values, rows, columns = parts(gate_up)
    count, width = values.shape
    size = width // 2
    result, out, out_scales = room(count, size, values, rounding)
    width = triton.next_power_of_2(size)
    if out_scales is None:
        width = min(_COLUMNS, width)
    silu_mul_kernel[(count, triton.cdiv(size, width))](
        values,
        rows,
        columns,
        out,
        out_scales,
        SIZE=size,
        WIDTH=width,
        **_silu_options(out_scales is not None, rows is not None),
        **pdl.options(),
    )
    return result
