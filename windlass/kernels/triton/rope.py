"""RoPE on the outputs of the QKV GEMM; writes keys and values to their pages.

One program per token and kv head computes optional norms, rotation and stores in one pass.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.attention_options import RopeOptions
from windlass.kernels.batch import Heads, LayerKV, StepBatch
from windlass.kernels.gemm_io import Outputs
from windlass.kernels.triton import pdl
from windlass.kernels.triton.kv_quant import encode, scale_of
from windlass.kernels.triton.norm import scaled, values_and_scales


@triton.jit
def _normed(first, second, weight, at, mask, eps, DIM: tl.constexpr, HALF: tl.constexpr):
    """RMSNorm of heads given as two halves [heads, half]."""
    total = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    scale = tl.rsqrt(total / DIM + eps)[:, None]
    kind = weight.dtype.element_ty
    low = tl.load(weight + at, mask=mask, other=0.0)[None, :]
    high = tl.load(weight + HALF + at, mask=mask, other=0.0)[None, :]
    first = (first * scale).to(kind) * low
    second = (second * scale).to(kind) * high
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _write(pages, scales, row, at, first, second, mask, DIM: tl.constexpr, HALF: tl.constexpr):
    """Write one token's head, given as two halves, to its row of the pages."""
    kind = pages.dtype.element_ty
    if scales is not None:
        first, second = first.to(tl.float32), second.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
        scale = scale_of(largest, kind)
        tl.store(scales + row + tl.arange(0, 1), scale)
        first, second = encode(first, scale[:, None], kind), encode(second, scale[:, None], kind)
    target = pages + row * DIM + at[None, :]
    tl.store(target, first.to(kind), mask=mask)
    tl.store(target + HALF, second.to(kind), mask=mask)


@triton.jit
def rope_write_kernel(
    qkv,
    qkv_rows,
    qkv_columns,
    q_out,
    keys,
    values,
    key_scales,
    value_scales,
    new_keys,
    new_values,
    cos_sin,
    positions,
    token_slots,
    tables,
    q_weight,
    k_weight,
    table_stride,
    eps,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    SIZE: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token and one kv head: the GROUP query heads that share it, its key and its value.

    Scales are None if pages are not quantised. `new_keys` and `new_values` [tokens, kv heads, dim], if
    given, receive keys and values before quantisation.
    """
    pdl.begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, HALF_PAD)
    mask = at < HALF
    position = tl.load(positions + token).to(tl.int64)
    cos = tl.load(cos_sin + position * DIM + at, mask=mask, other=0.0)[None, :]
    sin = tl.load(cos_sin + position * DIM + HALF + at, mask=mask, other=0.0)[None, :]
    row = qkv + token * ((GROUP + 2) * NUM_KV * DIM)
    kind = qkv.dtype.element_ty

    g = tl.arange(0, GROUP_PAD)
    q_mask = (g < GROUP)[:, None] & mask[None, :]
    q_at = (head * GROUP + g)[:, None] * DIM + at[None, :]
    a = tl.load(row + q_at, mask=q_mask, other=0.0)
    a = scaled(a, qkv_rows, qkv_columns, token, q_at, q_mask)
    b = tl.load(row + q_at + HALF, mask=q_mask, other=0.0)
    b = scaled(b, qkv_rows, qkv_columns, token, q_at + HALF, q_mask)
    if NORM:
        a, b = _normed(a, b, q_weight, at, mask, eps, DIM, HALF)
    target = q_out + token * (GROUP * NUM_KV * DIM) + q_at
    tl.store(target, (a * cos - b * sin).to(kind), mask=q_mask)
    tl.store(target + HALF, (b * cos + a * sin).to(kind), mask=q_mask)

    slot = tl.load(token_slots + token).to(tl.int64)
    block = tl.load(tables + slot * table_stride + position // SIZE).to(tl.int64)
    page_row = (block * NUM_KV + head) * SIZE + position % SIZE
    kv_mask = mask[None, :]
    source = (GROUP * NUM_KV + head) * DIM + at[None, :]
    a = tl.load(row + source, mask=kv_mask, other=0.0)
    a = scaled(a, qkv_rows, qkv_columns, token, source, kv_mask)
    b = tl.load(row + source + HALF, mask=kv_mask, other=0.0)
    b = scaled(b, qkv_rows, qkv_columns, token, source + HALF, kv_mask)
    if NORM:
        a, b = _normed(a, b, k_weight, at, mask, eps, DIM, HALF)
    low, high = (a * cos - b * sin).to(kind), (b * cos + a * sin).to(kind)
    _write(keys, key_scales, page_row, at, low, high, kv_mask, DIM, HALF)
    new_row = token * NUM_KV + head
    if new_keys is not None:
        _write(new_keys, None, new_row, at, low, high, kv_mask, DIM, HALF)

    source += NUM_KV * DIM
    low = tl.load(row + source, mask=kv_mask, other=0.0)
    low = scaled(low, qkv_rows, qkv_columns, token, source, kv_mask).to(kind)
    high = tl.load(row + source + HALF, mask=kv_mask, other=0.0)
    high = scaled(high, qkv_rows, qkv_columns, token, source + HALF, kv_mask).to(kind)
    _write(values, value_scales, page_row, at, low, high, kv_mask, DIM, HALF)
    if new_values is not None:
        _write(new_values, None, new_row, at, low, high, kv_mask, DIM, HALF)


def check(options: RopeOptions, heads: Heads) -> None:
    """Assert what `select` has checked: the kernels have no other options."""
    norms = options.norms
    assert options.rotated == heads.dim
    assert not options.interleaved
    assert norms is None or (norms.kind == "rms" and not norms.per_head)


def rope_write(
    qkv: Outputs,
    heads: Heads,
    options: RopeOptions,
    kv: LayerKV,
    batch: StepBatch,
    fresh: Tensor | None = None,
) -> Tensor:
    """Same contract as `reference.rope_write`, for pairs (i, i + dim/2) of all dimensions.

    `fresh` [2, tokens, kv heads, dim] receives the keys and values before quantisation.
    """
    check(options, heads)
    norms = options.norms
    values, rows, columns = values_and_scales(qkv)
    tokens = values.shape[0]
    q_out = values.new_empty((tokens, heads.num_q, heads.dim))
    q_weight, k_weight, eps = (norms.q, norms.k, norms.eps) if norms else (values, values, 0.0)
    half = heads.dim // 2
    group = heads.num_q // heads.num_kv
    rope_write_kernel[(tokens, heads.num_kv)](
        values,
        rows,
        columns,
        q_out,
        kv.keys,
        kv.values,
        kv.key_scales,
        kv.value_scales,
        *((None, None) if fresh is None else (fresh[0], fresh[1])),
        options.cos_sin,
        batch.positions,
        batch.token_slots,
        batch.table_of(kv),
        q_weight,
        k_weight,
        batch.tables.stride(1),
        eps,
        NUM_KV=heads.num_kv,
        GROUP=group,
        GROUP_PAD=triton.next_power_of_2(group),
        DIM=heads.dim,
        HALF=half,
        HALF_PAD=triton.next_power_of_2(half),
        SIZE=kv.block_size,
        NORM=norms is not None,
        num_warps=1,
        **pdl.options(),
    )
    return q_out
