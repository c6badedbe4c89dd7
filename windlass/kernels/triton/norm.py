"""RMSNorm and silu(gate) * up: one row per program, read once, written once.

Inputs may be GEMM outputs without their scales, and outputs may be quantised for the next GEMM
(gemm_io.py). Both are free here.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.gemm_io import InputQuant, Inputs, Outputs, UnscaledOutputs
from windlass.kernels.triton import pdl
from windlass.kernels.triton.quantise import allocate, store_quantised

_COLUMNS = 1024  # per program, if it does not need the whole row


@triton.jit
def scaled(value, rows, columns, row, column, mask):
    """GEMM outputs in float32, times the scales of `UnscaledOutputs`; None: already scaled."""
    value = value.to(tl.float32)
    if rows is not None:
        value *= tl.load(rows + row) * tl.load(columns + column, mask=mask, other=0.0)
    return value


@triton.jit
def gained(value, gain, NORM: tl.constexpr):
    """A normalised head times its weight: RMSNorm in the weight's dtype, LayerNorm in float32."""
    if NORM == "layer":
        return value * gain.to(tl.float32)
    else:
        return value.to(gain.dtype) * gain


@triton.jit
def normed(value, gain, eps, SIZE: tl.constexpr):
    """RMSNorm of a float32 row, times the gains."""
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    return (value * scale).to(gain.dtype) * gain


@triton.jit
def rms_norm_kernel(
    x,
    weight,
    out,
    out_scales,
    out_sums,
    stride,
    eps,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Row i has the gains of group i % GROUPS."""
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    mask = at < SIZE
    value = tl.load(x + row * stride + at, mask=mask, other=0.0).to(tl.float32)
    gain = tl.load(weight + row % GROUPS * SIZE + at, mask=mask, other=0.0)
    value = normed(value, gain, eps, SIZE)
    kind: tl.constexpr = x.dtype.element_ty
    store_quantised(value, out, out_scales, out_sums, row, 0, kind, SIZE, BLOCK, GROUP)


@triton.jit
def add_rms_norm_kernel(
    x,
    x_rows,
    x_columns,
    residual,
    weight,
    out,
    out_scales,
    out_sums,
    eps,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
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
    value = normed(value, gain, eps, SIZE)
    kind: tl.constexpr = residual.dtype.element_ty
    store_quantised(value, out, out_scales, out_sums, row, 0, kind, SIZE, BLOCK, GROUP)


@triton.jit
def _norm_in_place(x, weight, eps, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    mask = at < SIZE
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    gain = tl.load(weight + at, mask=mask, other=0.0)
    tl.store(x + at, normed(value, gain, eps, SIZE).to(x.dtype.element_ty), mask=mask)


@triton.jit
def qk_norm_kernel(
    qkv,
    q_weight,
    k_weight,
    stride,
    eps,
    Q_SIZE: tl.constexpr,
    K_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """The q (program 0) or k (program 1) of one row, in place."""
    pdl.begin(PDL)
    row = qkv + tl.program_id(0).to(tl.int64) * stride
    if tl.program_id(1) == 0:
        _norm_in_place(row, q_weight, eps, Q_SIZE, WIDTH)
    else:
        _norm_in_place(row + Q_SIZE, k_weight, eps, K_SIZE, WIDTH)


@triton.jit
def silu_mul_kernel(
    gate_up,
    rows,
    columns,
    out,
    out_scales,
    out_sums,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """silu(gate) * up for WIDTH columns of a row: whole blocks of planes, or all that share a scale."""
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * WIDTH
    at = first + tl.arange(0, WIDTH)
    mask = at < SIZE
    kind: tl.constexpr = gate_up.dtype.element_ty
    gate = tl.load(gate_up + row * 2 * SIZE + at, mask=mask, other=0.0)
    gate = scaled(gate, rows, columns, row, at, mask)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + at, mask=mask, other=0.0)
    if rows is not None:
        up = scaled(up, rows, columns, row, SIZE + at, mask).to(kind)
    active = (gate / (1 + tl.exp(-gate))).to(kind)
    value = active * up
    store_quantised(value, out, out_scales, out_sums, row, first, kind, SIZE, BLOCK, GROUP)


def _warps(width: int, in_planes: bool = False) -> int:
    """With 256 values per warp, codes of planes are stored as values are loaded: 8 by each thread."""
    return min(16, max(1, width // (256 if in_planes else 512)))


def values_and_scales(x: Outputs) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Values, and the scales of rows and columns if they are not applied yet."""
    return (x.values, x.rows, x.columns) if isinstance(x, UnscaledOutputs) else (x, None, None)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    input_quant: InputQuant | None = None,
    *,
    groups: int = 1,
) -> Inputs:
    """Same contract as `reference.rms_norm`. Groups are never quantised."""
    assert groups == 1 or input_quant is None
    size = x.shape[-1] // groups
    flat = x.reshape(-1, size)
    stored = allocate(flat.shape[0], size, flat, input_quant)
    width = stored.width(size)
    rms_norm_kernel[(flat.shape[0],)](
        flat,
        weight,
        stored.out,
        stored.scales,
        stored.sums,
        flat.stride(0),
        eps,
        SIZE=size,
        WIDTH=width,
        BLOCK=stored.block,
        GROUP=stored.group,
        GROUPS=groups,
        num_warps=_warps(width, stored.sums is not None),
        **pdl.options(),
    )
    result = stored.result
    return result.view(x.shape) if isinstance(result, Tensor) else result


def add_rms_norm(
    x: Outputs, residual: Tensor, weight: Tensor, eps: float, input_quant: InputQuant | None = None
) -> tuple[Inputs, Tensor]:
    """Same contract as `reference.add_rms_norm`, but the residual is updated in place."""
    values, rows, columns = values_and_scales(x)
    size = values.shape[-1]
    stored = allocate(values.shape[0], size, values, input_quant)
    width = stored.width(size)
    add_rms_norm_kernel[(values.shape[0],)](
        values,
        rows,
        columns,
        residual,
        weight,
        stored.out,
        stored.scales,
        stored.sums,
        eps,
        SIZE=size,
        WIDTH=width,
        BLOCK=stored.block,
        GROUP=stored.group,
        num_warps=_warps(width, stored.sums is not None),
        **pdl.options(),
    )
    return stored.result, residual


def qk_norm(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    """Same contract as `reference.qk_norm`, in place."""
    width = triton.next_power_of_2(len(q_weight))
    qk_norm_kernel[(qkv.shape[0], 2)](
        qkv,
        q_weight,
        k_weight,
        qkv.stride(0),
        eps,
        Q_SIZE=len(q_weight),
        K_SIZE=len(k_weight),
        WIDTH=width,
        num_warps=_warps(width),
        **pdl.options(),
    )
    return qkv


def _silu_options(whole_rows: bool, is_raw: bool) -> dict[str, int]:
    """A long row gives each thread many values; fewer registers let two programs overlap."""
    if not whole_rows:
        return {"num_warps": 4}
    return {"num_warps": 16} if is_raw else {"num_warps": 16, "maxnreg": 64}


def silu_mul(gate_up: Outputs, input_quant: InputQuant | None = None) -> Inputs:
    """Same contract as `reference.silu_mul`."""
    values, rows, columns = values_and_scales(gate_up)
    count, width = values.shape
    size = width // 2
    stored = allocate(count, size, values, input_quant)
    width = stored.width(size if stored.is_by_row else min(size, _COLUMNS))
    silu_mul_kernel[(count, triton.cdiv(size, width))](
        values,
        rows,
        columns,
        stored.out,
        stored.scales,
        stored.sums,
        SIZE=size,
        WIDTH=width,
        BLOCK=stored.block,
        GROUP=stored.group,
        **_silu_options(stored.is_by_row, rows is not None),
        **pdl.options(),
    )
    return stored.result
