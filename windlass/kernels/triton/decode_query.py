"""RoPE and KV cache writes inside the decode kernel, from the outputs of the QKV GEMM.

Fusing saves a launch in the short sequence of kernels of a decode step. Keys and values are written,
and quantised, before the scan reads them, so a token attends to what later steps read. A token also
writes the keys and values of the tokens before it in its row: all programs write the same bits, so
none has to wait.
An alternative (sibling) of a row's second token attends to the first token and itself. Its key goes
to a spare page and is copied from there if the alternative is accepted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from windlass.kernels.triton.kv_quant import encode, scale_of
from windlass.kernels.triton.norm import gained, scaled


@triton.jit
def soft_capped(scores, cap, CAPPED: tl.constexpr):
    """Apply the soft cap; scores and cap are in units of log2."""
    if CAPPED:
        twice = tl.exp2(scores * (2 * 1.4426950408889634 / cap))
        scores = cap * (1 - 2 / (twice + 1))
    return scores


@triton.jit
def is_sibling(token, position, width, SIBLINGS: tl.constexpr):
    """1 for the last SIBLINGS tokens of a row, if they are in use, else 0."""
    index = (token % width).to(tl.int32)
    return ((index >= width - SIBLINGS) & (position > 0)).to(tl.int32)


@triton.jit
def _load(qkv, back, at, mask, STRIDE: tl.constexpr):
    """Values of the GEMM's rows that are `back` tokens before the token's own row."""
    source, rows, columns, token = qkv
    value = tl.load(source - back * STRIDE + at, mask=mask, other=0.0)
    return scaled(value, rows, columns, token - back, at, mask)


@triton.jit
def _partner(d, DIM: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The other dimension of each dimension's pair; the same one if it is not rotated."""
    half: tl.constexpr = ROTATED // 2
    if INTERLEAVED:
        return tl.where(d < ROTATED, d ^ 1, d)
    elif ROTATED == DIM:
        return tl.where(d < half, d + half, d - half)
    else:
        return tl.where(d < half, d + half, tl.where(d < ROTATED, d - half, d))


@triton.jit
def _angles(cos_sin, position, d, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Cosines and sines of each dimension at positions [n, 1]; the sines have their partners' signs."""
    cos, sin = 1.0, 0.0
    if ROTATED > 0:
        half: tl.constexpr = ROTATED // 2
        pair = d // 2 if INTERLEAVED else d % half
        is_first = d % 2 == 0 if INTERLEAVED else d < half
        at = cos_sin + position.to(tl.int64) * ROTATED + pair[None, :]
        mask = (d < ROTATED)[None, :]
        cos = tl.load(at, mask=mask, other=0.0)
        sin = tl.load(at + half, mask=mask, other=0.0)
        sin = tl.where(is_first[None, :], -sin, sin)
    return cos, sin


@triton.jit
def _gain(weight, heads, at, mask, PER_HEAD: tl.constexpr):
    """Norm weights of dimensions, for each head or for all; `heads`: the first weight of each."""
    if PER_HEAD:
        return tl.load(weight + heads[:, None] + at[None, :], mask=mask[None, :], other=0.0)
    else:
        return tl.load(weight + at, mask=mask, other=0.0)[None, :]


@triton.jit
def _pairs(
    qkv, back, heads, mask, d,
    DIM: tl.constexpr, STRIDE: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Heads of the GEMM's rows `back` tokens before the token's own row, and their dimensions' partners."""
    own = _load(qkv, back, heads[:, None] + d[None, :], mask, STRIDE)
    other = own
    if ROTATED > 0:
        partner = _partner(d, DIM, ROTATED, INTERLEAVED)
        other = _load(qkv, back, heads[:, None] + partner[None, :], mask, STRIDE)
    return own, other


@triton.jit
def _rotated(
    pairs, angles, mask, d, weight, weight_at, eps, kind: tl.constexpr,
    DIM: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    """What `_pairs` returns, normalised (NORM) and rotated by `_angles`.

    `weight_at`: the first weight of each head, if PER_HEAD.
    """
    own, other = pairs
    cos, sin = angles
    if NORM is not None:
        inside = d < DIM
        mean = 0.0
        if NORM == "layer":
            mean = (tl.sum(own, 1) / DIM)[:, None]
            own = tl.where(mask, own - mean, 0.0)
        scale = tl.rsqrt(tl.sum(own * own, 1) / DIM + eps)[:, None]
        gain = _gain(weight, weight_at, d, inside, PER_HEAD)
        own = gained(own * scale, gain, NORM).to(kind).to(tl.float32)
        if ROTATED > 0:
            partner = _partner(d, DIM, ROTATED, INTERLEAVED)
            other_gain = _gain(weight, weight_at, partner, inside, PER_HEAD)
            if NORM == "layer":
                other -= mean
            other = gained(other * scale, other_gain, NORM).to(kind).to(tl.float32)
    if ROTATED > 0:
        turned = tl.fma(own, cos, other * sin)  # rounds as in rope.py
        own = tl.where((d < ROTATED)[None, :], turned, own) if ROTATED < DIM else turned
    return own.to(kind)


@triton.jit
def _write(pages, scales, rows, x, active, mask, d, DIM: tl.constexpr):
    """Write the rows of x to the pages, quantised if there are scales; `active` masks the rows."""
    kind = pages.dtype.element_ty
    if scales is not None:
        x = x.to(tl.float32)
        scale = scale_of(tl.max(tl.abs(x), 1), kind)
        tl.store(scales + rows, scale, mask=active)
        x = encode(x, scale[:, None], kind)
    tl.store(pages + rows[:, None] * DIM + d[None, :], x.to(kind), mask=mask)


@triton.jit
def _load_new(
    qkv, cos_sin, table, head, position, begin, end, last, before, d, width, spare,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    STRIDE: tl.constexpr, NEW: tl.constexpr, SIBLINGS: tl.constexpr, ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Load what `_write_new` writes: the keys and values of the token and of `before` tokens before it.

    Returns pairs and angles of the keys, the values, their rows of the pages, and which of them are in
    [begin, end).
    """
    token = qkv[3]
    stride: tl.constexpr = (GROUP + 2) * NUM_KV * DIM
    n = tl.arange(0, NEW)  # the token itself, then those before it
    ago = tl.minimum(n, before)
    target = position - ago
    active = (n <= before) & (target >= begin) & (target < end)
    block = tl.load(table + target // SIZE).to(tl.int64)
    rows = block * STRIDE + head * SIZE + target % SIZE
    back = ago
    if SIBLINGS > 0:
        sibling = is_sibling(token, position, width, SIBLINGS)
        at = (token % width).to(tl.int32)
        back = tl.where((sibling > 0) & (n > 0), at, ago)
        own = (sibling > 0) & (n == 0)
        spare_row = (token // width) * SIBLINGS + at - (width - SIBLINGS)
        rows = tl.where(own, spare.to(tl.int64) * STRIDE + head * SIZE + spare_row, rows)
        active = tl.where(own, last, active)
    back = back[:, None]
    mask = active[:, None] & (d < DIM)[None, :]
    k_at = (GROUP * NUM_KV + head) * DIM + n * 0
    pairs = _pairs(qkv, back, k_at, mask, d, DIM, stride, ROTATED, INTERLEAVED)
    v_at = (k_at + NUM_KV * DIM)[:, None] + d[None, :]
    v = _load(qkv, back, v_at, mask, stride).to(qkv[0].dtype.element_ty)
    angles = _angles(cos_sin, target[:, None], d, ROTATED, INTERLEAVED)
    return pairs, angles, v, rows, active


@triton.jit
def _write_new(
    new, pages, weight, head, d, eps,
    DIM: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    """Rotate new keys, and write them and their values to the pages."""
    pairs, angles, v, rows, active = new
    keys, values, key_scales, value_scales = pages
    mask = active[:, None] & (d < DIM)[None, :]
    weight_at = head * DIM + tl.zeros_like(rows)
    k = _rotated(
        *(pairs, angles, mask, d, weight, weight_at, eps, v.dtype),
        *(DIM, ROTATED, INTERLEAVED, NORM, PER_HEAD),
    )
    _write(keys, key_scales, rows, k, active, mask, d, DIM)
    _write(values, value_scales, rows, v, active, mask, d, DIM)


@triton.jit
def decode_query(
    qkv, pages, cos_sin, weights, table, head, position, begin, end, last, g, d, eps, width, spare,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    STRIDE: tl.constexpr, NEW: tl.constexpr, SIBLINGS: tl.constexpr, ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    """Rotate one token's queries of a kv head, and write new keys and values in [begin, end).

    These are the keys and values of the token itself and of the tokens before it in its row. `qkv` is
    the token's row of the GEMM, the scales of `UnscaledOutputs`, and the token index. NEW > 1: rows
    have `width` adjacent tokens, up to NEW; unused tokens are at position 0 of the padding slot. The
    last SIBLINGS tokens are alternatives; the program of the `last` split writes their keys to page
    `spare`.
    """
    q_weight, k_weight = weights
    token = qkv[3]
    kind: tl.constexpr = qkv[0].dtype.element_ty
    stride: tl.constexpr = (GROUP + 2) * NUM_KV * DIM
    before = 0
    if NEW > 1:
        before = tl.minimum((token % width).to(tl.int32), position)
    if SIBLINGS > 0:
        before = tl.where(is_sibling(token, position, width, SIBLINGS) > 0, 1, before)
    # Loading everything first overlaps the loads, if there are registers for it. One key is so little
    # work that a program that has none to write does it too: the branch would take more registers.
    FIRST: tl.constexpr = NEW == 1 or DIM <= 256
    if FIRST:
        new = _load_new(
            *(qkv, cos_sin, table, head, position, begin, end, last, before, d, width, spare),
            *(NUM_KV, GROUP, DIM, SIZE, STRIDE, NEW, SIBLINGS, ROTATED, INTERLEAVED),
        )
    q_mask = (g < GROUP)[:, None] & (d < DIM)[None, :]
    q_at = (head * GROUP + g) * DIM
    q_pairs = _pairs(qkv, 0, q_at, q_mask, d, DIM, stride, ROTATED, INTERLEAVED)
    q_angles = _angles(cos_sin, position + tl.zeros([1, 1], tl.int32), d, ROTATED, INTERLEAVED)
    q = _rotated(
        *(q_pairs, q_angles, q_mask, d, q_weight, tl.where(g < GROUP, q_at, 0), eps, kind),
        *(DIM, ROTATED, INTERLEAVED, NORM, PER_HEAD),
    )
    writes = True
    if NEW > 1:
        writes = end > position - before
    if writes:
        if not FIRST:
            new = _load_new(
                *(qkv, cos_sin, table, head, position, begin, end, last, before, d, width, spare),
                *(NUM_KV, GROUP, DIM, SIZE, STRIDE, NEW, SIBLINGS, ROTATED, INTERLEAVED),
            )
        _write_new(new, pages, k_weight, head, d, eps, DIM, ROTATED, INTERLEAVED, NORM, PER_HEAD)
    tl.debug_barrier()  # the attention below reads the new keys and values
    return q


@triton.jit
def attend_self(
    state, sees, q, qkv, cos_sin, weight, head, position, g, d, eps, scale, cap,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, PER_HEAD: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Add a token's own key, which is in no page of its row, to the softmax state if `sees`."""
    m, total, acc = state
    stride: tl.constexpr = (GROUP + 2) * NUM_KV * DIM
    mask = (g < 1)[:, None] & (d < DIM)[None, :]
    k_at = (GROUP * NUM_KV + head) * DIM + g * 0
    k = _rotated(
        _pairs(qkv, 0, k_at, mask, d, DIM, stride, ROTATED, INTERLEAVED),
        _angles(cos_sin, position + tl.zeros([1, 1], tl.int32), d, ROTATED, INTERLEAVED),
        *(mask, d, weight, head * DIM + g * 0, eps, qkv[0].dtype.element_ty),
        *(DIM, ROTATED, INTERLEAVED, NORM, PER_HEAD),
    )
    v_at = (k_at + NUM_KV * DIM)[:, None] + d[None, :]
    v = _load(qkv, 0, v_at, mask, stride).to(qkv[0].dtype.element_ty).to(tl.float32)
    score = tl.sum(q.to(tl.float32) * tl.sum(k.to(tl.float32), 0)[None, :], 1) * scale
    score = soft_capped(score, cap, CAPPED)
    score = tl.where(sees, score, float("-inf"))
    m_new = tl.maximum(m, score)
    old, new = tl.exp2(m - m_new), tl.exp2(score - m_new)
    acc = acc * old[:, None] + new[:, None] * tl.sum(v, 0)[None, :]
    return m_new, total * old + new, acc
