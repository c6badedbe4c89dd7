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
from windlass.kernels.triton.norm import gained, scaled, values_and_scales


@triton.jit
def _pairs(at, DIM: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The first dimension of each pair, and the distance to the second.

    Dimensions that are not rotated form pairs too, so that all of a head is read and written.
    """
    half: tl.constexpr = ROTATED // 2
    if INTERLEAVED:
        return 2 * at, 1
    elif ROTATED == DIM:
        return at, half
    else:
        return tl.where(at < half, at, 2 * at), tl.where(at < half, half, 1)


@triton.jit
def _angles(cos_sin, position, at, ROTATED: tl.constexpr):
    """The cosines and sines of a position's pairs [1, half]; of ones that are not rotated, 0."""
    cos, sin = 0.0, 0.0
    if ROTATED > 0:
        half: tl.constexpr = ROTATED // 2
        mask = at < half
        cos = tl.load(cos_sin + position * ROTATED + at, mask=mask, other=0.0)[None, :]
        sin = tl.load(cos_sin + position * ROTATED + half + at, mask=mask, other=0.0)[None, :]
    return cos, sin


@triton.jit
def _turned(a, b, cos, sin, at, kind: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr):
    """Rotate pairs; those beyond ROTATED are unchanged. The compiler would choose other FMAs per kernel."""
    if ROTATED == 0:
        return a.to(kind), b.to(kind)
    low, high = tl.fma(a, cos, b * -sin), tl.fma(b, cos, a * sin)
    if ROTATED < DIM:
        turned = (at < ROTATED // 2)[None, :]
        low, high = tl.where(turned, low, a), tl.where(turned, high, b)
    return low.to(kind), high.to(kind)


@triton.jit
def _normed(
    first, second, weight, heads, at, step, mask, eps, kind: tl.constexpr, DIM: tl.constexpr,
    NORM: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    """Norm of heads given as the two halves of their pairs [heads, half].

    The weights are those of the dimensions `at` and `at + step`; `mask` is of the pairs.
    """
    if NORM == "layer":
        mean = ((tl.sum(first, 1) + tl.sum(second, 1)) / DIM)[:, None]
        inside = mask[None, :]
        first, second = tl.where(inside, first - mean, 0.0), tl.where(inside, second - mean, 0.0)
    total = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    scale = tl.rsqrt(total / DIM + eps)[:, None]
    if PER_HEAD:
        weight_at = (heads * DIM)[:, None] + at[None, :]
        low = tl.load(weight + weight_at, mask=mask[None, :], other=0.0)
        high = tl.load(weight + weight_at + step, mask=mask[None, :], other=0.0)
    else:
        low = tl.load(weight + at, mask=mask, other=0.0)[None, :]
        high = tl.load(weight + step + at, mask=mask, other=0.0)[None, :]
    first, second = gained(first * scale, low, NORM), gained(second * scale, high, NORM)
    return first.to(kind).to(tl.float32), second.to(kind).to(tl.float32)


@triton.jit
def _write(pages, scales, row, at, step, first, second, mask, DIM: tl.constexpr):
    """Write one token's head, given as the two halves of its pairs, to its row of the pages."""
    kind = pages.dtype.element_ty
    if scales is not None:
        first, second = first.to(tl.float32), second.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
        scale = scale_of(largest, kind)
        tl.store(scales + row + tl.arange(0, 1), scale)
        first, second = encode(first, scale[:, None], kind), encode(second, scale[:, None], kind)
    target = pages + row * DIM + at[None, :]
    tl.store(target, first.to(kind), mask=mask)
    tl.store(target + step, second.to(kind), mask=mask)


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
    HALF_PAD: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    PER_HEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token and one kv head: the GROUP query heads that share it, its key and its value.

    Scales are None if pages are not quantised. `new_keys` and `new_values` [tokens, kv heads, dim], if
    given, receive keys and values before quantisation. NORM is None, "rms" or "layer"; PER_HEAD: every
    head has its own weight.
    """
    pdl.begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    lane = tl.arange(0, HALF_PAD)
    mask = lane < DIM // 2
    at, step = _pairs(lane, DIM, ROTATED, INTERLEAVED)
    position = tl.load(positions + token).to(tl.int64)
    cos, sin = _angles(cos_sin, position, lane, ROTATED)
    row = qkv + token * ((GROUP + 2) * NUM_KV * DIM)
    kind: tl.constexpr = qkv.dtype.element_ty

    g = tl.arange(0, GROUP_PAD)
    q_mask = (g < GROUP)[:, None] & mask[None, :]
    q_at = (head * GROUP + g)[:, None] * DIM + at[None, :]
    a = tl.load(row + q_at, mask=q_mask, other=0.0)
    a = scaled(a, qkv_rows, qkv_columns, token, q_at, q_mask)
    b = tl.load(row + q_at + step, mask=q_mask, other=0.0)
    b = scaled(b, qkv_rows, qkv_columns, token, q_at + step, q_mask)
    if NORM is not None:
        own = head * GROUP + tl.minimum(g, GROUP - 1)
        a, b = _normed(a, b, q_weight, own, at, step, mask, eps, kind, DIM, NORM, PER_HEAD)
    target = q_out + token * (GROUP * NUM_KV * DIM) + q_at
    low, high = _turned(a, b, cos, sin, lane, kind, DIM, ROTATED)
    tl.store(target, low, mask=q_mask)
    tl.store(target + step, high, mask=q_mask)

    slot = tl.load(token_slots + token).to(tl.int64)
    block = tl.load(tables + slot * table_stride + position // SIZE).to(tl.int64)
    page_row = block * STRIDE + head * SIZE + position % SIZE
    kv_mask = mask[None, :]
    source = (GROUP * NUM_KV + head) * DIM + at[None, :]
    a = tl.load(row + source, mask=kv_mask, other=0.0)
    a = scaled(a, qkv_rows, qkv_columns, token, source, kv_mask)
    b = tl.load(row + source + step, mask=kv_mask, other=0.0)
    b = scaled(b, qkv_rows, qkv_columns, token, source + step, kv_mask)
    if NORM is not None:
        own = head + tl.arange(0, 1)
        a, b = _normed(a, b, k_weight, own, at, step, mask, eps, kind, DIM, NORM, PER_HEAD)
    low, high = _turned(a, b, cos, sin, lane, kind, DIM, ROTATED)
    _write(keys, key_scales, page_row, at, step, low, high, kv_mask, DIM)
    new_row = token * NUM_KV + head
    if new_keys is not None:
        _write(new_keys, None, new_row, at, step, low, high, kv_mask, DIM)

    source += NUM_KV * DIM
    low = tl.load(row + source, mask=kv_mask, other=0.0)
    low = scaled(low, qkv_rows, qkv_columns, token, source, kv_mask).to(kind)
    high = tl.load(row + source + step, mask=kv_mask, other=0.0)
    high = scaled(high, qkv_rows, qkv_columns, token, source + step, kv_mask).to(kind)
    _write(values, value_scales, page_row, at, step, low, high, kv_mask, DIM)
    if new_values is not None:
        _write(new_values, None, new_row, at, step, low, high, kv_mask, DIM)


def rope_write(
    qkv: Outputs,
    heads: Heads,
    options: RopeOptions,
    kv: LayerKV,
    batch: StepBatch,
    fresh: Tensor | None = None,
) -> Tensor:
    """Same contract as `reference.rope_write`.

    `fresh` [2, tokens, kv heads, dim] receives the keys and values before quantisation.
    """
    norms = options.norms
    values, rows, columns = values_and_scales(qkv)
    tokens = values.shape[0]
    q_out = values.new_empty((tokens, heads.num_q, heads.dim))
    q_weight, k_weight, eps = (norms.q, norms.k, norms.eps) if norms else (values, values, 0.0)
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
        HALF_PAD=triton.next_power_of_2(heads.dim // 2),
        SIZE=kv.block_size,
        STRIDE=kv.stride,
        ROTATED=options.rotated,
        INTERLEAVED=options.interleaved,
        NORM=norms.kind if norms is not None else None,
        PER_HEAD=norms is not None and norms.per_head,
        num_warps=1,
        **pdl.options(),
    )
    return q_out
