"""From one token's q, k, v product to its rotated queries, inside of the decode kernel.

Saves a launch in the short chain of kernels that a decode step is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from windlass.kernels.triton.kv_codes import coded, scale_of
from windlass.kernels.triton.norm import scaled


@triton.jit
def _turned(qkv, heads, mask, d, rotation, weight, eps, DIM: tl.constexpr, NORM: tl.constexpr):
    """Heads of a product, normalised first (NORM), then rotated by a row of cos and sin."""
    source, rows, columns, token = qkv
    kind = source.dtype.element_ty
    partner = tl.where(d < DIM // 2, d + DIM // 2, d - DIM // 2)
    at = heads[:, None] + d[None, :]
    own = tl.load(source + at, mask=mask, other=0.0)
    own = scaled(own, rows, columns, token, at, mask)
    at = heads[:, None] + partner[None, :]
    other = tl.load(source + at, mask=mask, other=0.0)
    other = scaled(other, rows, columns, token, at, mask)
    inside = d < DIM
    if NORM:
        scale = tl.rsqrt(tl.sum(own * own, 1) / DIM + eps)[:, None]
        gain = tl.load(weight + d, mask=inside, other=0.0)[None, :]
        other_gain = tl.load(weight + partner, mask=inside, other=0.0)[None, :]
        own = ((own * scale).to(kind) * gain).to(tl.float32)
        other = ((other * scale).to(kind) * other_gain).to(tl.float32)
    angle = d % (DIM // 2)
    cos = tl.load(rotation + angle, mask=inside, other=0.0)[None, :]
    sin = tl.load(rotation + DIM // 2 + angle, mask=inside, other=0.0)[None, :]
    return (own * cos + other * tl.where(d < DIM // 2, -sin, sin)).to(kind)


@triton.jit
def _write(pages, scales, row, x, g, d, DIM: tl.constexpr):
    """Put the first row of x into its place in the pages."""
    kind = pages.dtype.element_ty
    if scales is not None:
        x = x.to(tl.float32)
        scale = scale_of(tl.max(tl.abs(x), 1), kind)
        tl.store(scales + row + g * 0, scale, mask=g < 1)
        x = coded(x, scale[:, None], kind)
    at = row * DIM + (g * 0)[:, None] + d
    tl.store(pages + at, x.to(kind), mask=(g < 1)[:, None] & (d < DIM)[None, :])


@triton.jit
def decode_query(
    qkv,
    pages,
    cos_sin,
    weights,
    table,
    head,
    position,
    writes,
    g,
    d,
    eps,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    NORM: tl.constexpr,
):
    """One token's rotated queries of a kv head; whoever `writes` puts its key and value in place.

    `qkv` is the token's row of the product, the scales that it came without, and the token.
    """
    keys, values, key_scales, value_scales = pages
    q_weight, k_weight = weights
    rotation = cos_sin + position.to(tl.int64) * DIM
    q_mask = (g < GROUP)[:, None] & (d < DIM)[None, :]
    q = _turned(qkv, (head * GROUP + g) * DIM, q_mask, d, rotation, q_weight, eps, DIM, NORM)
    if writes:
        one = (g < 1)[:, None] & (d < DIM)[None, :]
        k_at = (GROUP * NUM_KV + head) * DIM + g * 0
        k = _turned(qkv, k_at, one, d, rotation, k_weight, eps, DIM, NORM)
        v_at = (k_at + NUM_KV * DIM)[:, None] + d[None, :]
        source, rows, columns, token = qkv
        v = tl.load(source + v_at, mask=one, other=0.0)
        v = scaled(v, rows, columns, token, v_at, one).to(source.dtype.element_ty)
        block = tl.load(table + position // SIZE).to(tl.int64)
        row = (block * NUM_KV + head) * SIZE + position % SIZE
        _write(keys, key_scales, row, k, g, d, DIM)
        _write(values, value_scales, row, v, g, d, DIM)
    tl.debug_barrier()  # what was written is read below
    return q
