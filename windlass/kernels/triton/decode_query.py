"""From one token's q, k, v product to its rotated queries, inside of the decode kernel.

Saves a launch in the short chain of kernels that a decode step is. A token whose row has others
before it in the same step puts the keys and values of those in place too: all of them write the
same bits, and nobody has to wait. An alternative to a row's second token sees the first and itself,
and its key goes to a spare page, from where it is fetched if it proves right.
"""

from __future__ import annotations

import triton
import triton.language as tl

from windlass.kernels.triton.kv_codes import coded, scale_of
from windlass.kernels.triton.norm import scaled


@triton.jit
def is_sibling(token, position, width, SIBLINGS: tl.constexpr):
    """1 for the last OTHERS places of a row, where they are in use, else 0."""
    place = (token % width).to(tl.int32)
    return ((place >= width - SIBLINGS) & (position > 0)).to(tl.int32)


@triton.jit
def _part(qkv, back, at, mask, STRIDE: tl.constexpr):
    """Values of a product's rows, so many tokens before its own."""
    source, rows, columns, token = qkv
    value = tl.load(source - back * STRIDE + at, mask=mask, other=0.0)
    return scaled(value, rows, columns, token - back, at, mask)


@triton.jit
def _turned(
    qkv, back, ago, heads, mask, d, rotation, weight, eps,
    DIM: tl.constexpr, STRIDE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Heads of a product's rows, normalised first (NORM), then rotated by a row of cos and sin.

    The rows are `back` tokens before the product's own, at positions `ago` before its.
    """
    kind = qkv[0].dtype.element_ty
    partner = tl.where(d < DIM // 2, d + DIM // 2, d - DIM // 2)
    own = _part(qkv, back, heads[:, None] + d[None, :], mask, STRIDE)
    other = _part(qkv, back, heads[:, None] + partner[None, :], mask, STRIDE)
    inside = d < DIM
    if NORM:
        scale = tl.rsqrt(tl.sum(own * own, 1) / DIM + eps)[:, None]
        gain = tl.load(weight + d, mask=inside, other=0.0)[None, :]
        other_gain = tl.load(weight + partner, mask=inside, other=0.0)[None, :]
        own = ((own * scale).to(kind) * gain).to(tl.float32)
        other = ((other * scale).to(kind) * other_gain).to(tl.float32)
    angle = rotation - ago * DIM + (d % (DIM // 2))[None, :]
    cos = tl.load(angle, mask=inside[None, :], other=0.0)
    sin = tl.load(angle + DIM // 2, mask=inside[None, :], other=0.0)
    return (own * cos + other * tl.where(d < DIM // 2, -sin, sin)).to(kind)


@triton.jit
def _write(pages, scales, rows, x, wanted, mask, d, DIM: tl.constexpr):
    """Put the wanted rows of x into their places in the pages."""
    kind = pages.dtype.element_ty
    if scales is not None:
        x = x.to(tl.float32)
        scale = scale_of(tl.max(tl.abs(x), 1), kind)
        tl.store(scales + rows, scale, mask=wanted)
        x = coded(x, scale[:, None], kind)
    tl.store(pages + rows[:, None] * DIM + d[None, :], x.to(kind), mask=mask)


@triton.jit
def decode_query(
    qkv, pages, cos_sin, weights, table, head, position, begin, end, last, g, d, eps, width, spare,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    WIDE: tl.constexpr, SIBLINGS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One token's rotated queries of a kv head; new keys and values of positions begin to end, its
    own and those of tokens before it in its row, are put in place.

    `qkv` is the token's row of the product, the scales that it came without, and the token. WIDE:
    rows have `width` places side by side; those that nobody has are at position 0 of a spare page.
    The last OTHERS of them are alternatives; who has the `last` keys puts theirs into page `spare`.
    """
    keys, values, key_scales, value_scales = pages
    q_weight, k_weight = weights
    token = qkv[3]
    stride: tl.constexpr = (GROUP + 2) * NUM_KV * DIM
    rotation = cos_sin + position.to(tl.int64) * DIM
    q_mask = (g < GROUP)[:, None] & (d < DIM)[None, :]
    q_at = (head * GROUP + g) * DIM
    q = _turned(qkv, 0, 0, q_at, q_mask, d, rotation, q_weight, eps, DIM, stride, NORM)
    before = 0
    if WIDE:
        before = tl.minimum((token % width).to(tl.int32), position)
    if SIBLINGS > 0:
        other = is_sibling(token, position, width, SIBLINGS)
        before = tl.where(other > 0, 1, before)
    if end > position - before:
        ago = tl.minimum(g, before)
        place = position - ago
        wanted = (g <= before) & (place >= begin) & (place < end)
        block = tl.load(table + place // SIZE).to(tl.int64)
        rows = (block * NUM_KV + head) * SIZE + place % SIZE
        back = ago
        if SIBLINGS > 0:
            at = (token % width).to(tl.int32)
            back = tl.where((other > 0) & (g > 0), at, ago)
            own = (other > 0) & (g == 0)
            spared = (token // width) * SIBLINGS + at - (width - SIBLINGS)
            rows = tl.where(own, (spare.to(tl.int64) * NUM_KV + head) * SIZE + spared, rows)
            wanted = tl.where(own, last, wanted)
        mask = wanted[:, None] & (d < DIM)[None, :]
        k_at = (GROUP * NUM_KV + head) * DIM + g * 0
        back, ago = back[:, None], ago[:, None]
        k = _turned(qkv, back, ago, k_at, mask, d, rotation, k_weight, eps, DIM, stride, NORM)
        v_at = (k_at + NUM_KV * DIM)[:, None] + d[None, :]
        v = _part(qkv, back, v_at, mask, stride).to(qkv[0].dtype.element_ty)
        _write(keys, key_scales, rows, k, wanted, mask, d, DIM)
        _write(values, value_scales, rows, v, wanted, mask, d, DIM)
    tl.debug_barrier()  # what was written is read below
    return q


@triton.jit
def see_own(
    state, sees, q, qkv, cos_sin, weight, head, position, g, d, eps, scale,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """A running softmax that has seen a token's own key too, if it `sees` it: not from any page."""
    m, total, acc = state
    stride: tl.constexpr = (GROUP + 2) * NUM_KV * DIM
    one = (g < 1)[:, None] & (d < DIM)[None, :]
    k_at = (GROUP * NUM_KV + head) * DIM + g * 0
    rotation = cos_sin + position.to(tl.int64) * DIM
    k = _turned(qkv, 0, 0, k_at, one, d, rotation, weight, eps, DIM, stride, NORM)
    v_at = (k_at + NUM_KV * DIM)[:, None] + d[None, :]
    v = _part(qkv, 0, v_at, one, stride).to(qkv[0].dtype.element_ty).to(tl.float32)
    score = tl.sum(q.to(tl.float32) * tl.sum(k.to(tl.float32), 0)[None, :], 1) * scale
    score = tl.where(sees, score, float("-inf"))
    m_new = tl.maximum(m, score)
    old, new = tl.exp2(m - m_new), tl.exp2(score - m_new)
    acc = acc * old[:, None] + new[:, None] * tl.sum(v, 0)[None, :]
    return m_new, total * old + new, acc
