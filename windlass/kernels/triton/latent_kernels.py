"""The kernels of latent.py: writes of latent vectors, GEMMs per head, split-KV decode and tiled prefill.

A program of attention reads each latent vector once, for up to 64 rows: heads of a token, or of
neighbouring tokens of a chunk. Lengths are read on the device. Block ids are loaded one tile ahead, as in
attention_kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from windlass.kernels.triton import pdl
from windlass.kernels.triton.attention_kernels import _start, _store_split
from windlass.kernels.triton.kv_quant import encode, scale_of


@triton.jit
def _rotated(at, pair, cos, sin, mask, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load and rotate pairs: the first and second features of each."""
    if INTERLEAVED:
        a = tl.load(at + 2 * pair, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(at + 2 * pair + 1, mask=mask, other=0.0).to(tl.float32)
    else:
        a = tl.load(at + pair, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(at + HALF + pair, mask=mask, other=0.0).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def latent_write_kernel(
    q, latent, weight, cos_sin, pages, scales, fresh, rotated, positions, token_slots, tables,
    q_stride, latent_stride, rotated_token, rotated_head, table_stride, eps,
    NUM_Q: tl.constexpr, NUM_Q_PAD: tl.constexpr, NOPE: tl.constexpr,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    SIZE: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token: normalise and rotate its latent vector, write it, and write the queries' rotated part.

    `fresh` gets the latent vector before quantisation.
    """
    pdl.begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    pair, d = tl.arange(0, HALF_PAD), tl.arange(0, RANK_PAD)
    mask, low_mask = pair < HALF, d < RANK
    table = cos_sin + position * (2 * HALF)
    cos = tl.load(table + pair, mask=mask, other=0.0)
    sin = tl.load(table + HALF + pair, mask=mask, other=0.0)

    source = latent + token * latent_stride
    kind = latent.dtype.element_ty
    low = tl.load(source + d, mask=low_mask, other=0.0).to(tl.float32)
    gain = tl.load(weight + d, mask=low_mask, other=0.0)
    low = low * tl.rsqrt(tl.sum(low * low) / RANK + eps)
    low = (low.to(kind) * gain).to(tl.float32)
    first, second = _rotated(source + RANK, pair, cos, sin, mask, HALF, INTERLEAVED)
    first, second = first.to(kind).to(tl.float32), second.to(kind).to(tl.float32)
    slot = tl.load(token_slots + token).to(tl.int64)
    block = tl.load(tables + slot * table_stride + position // SIZE).to(tl.int64)
    row = block * SIZE + position % SIZE
    code = pages.dtype.element_ty
    if fresh is not None:
        at = fresh + token * (RANK + 2 * HALF)
        tl.store(at + d, low.to(kind), mask=low_mask)
        tl.store(at + RANK + pair, first.to(kind), mask=mask)
        tl.store(at + RANK + HALF + pair, second.to(kind), mask=mask)
    if scales is not None:
        largest = tl.maximum(tl.max(tl.abs(low)), tl.max(tl.abs(first)))
        scale = scale_of(tl.maximum(largest, tl.max(tl.abs(second))), code)
        tl.store(scales + row, scale)
        low, first = encode(low, scale, code), encode(first, scale, code)
        second = encode(second, scale, code)
    target = pages + row * (RANK + 2 * HALF)
    tl.store(target + d, low.to(code), mask=low_mask)
    tl.store(target + RANK + pair, first.to(code), mask=mask)
    tl.store(target + RANK + HALF + pair, second.to(code), mask=mask)

    g = tl.arange(0, NUM_Q_PAD)[:, None]
    q_mask = (g < NUM_Q) & mask[None, :]
    source = q + token * q_stride + g * (NOPE + 2 * HALF) + NOPE
    first, second = _rotated(
        source, pair[None, :], cos[None, :], sin[None, :], q_mask, HALF, INTERLEAVED
    )
    target = rotated + token * rotated_token + g * rotated_head + pair[None, :]
    tl.store(target, first.to(kind), mask=q_mask)
    tl.store(target + HALF, second.to(kind), mask=q_mask)


@triton.jit
def per_head_kernel(
    x, weight, out, M, x_row, x_head, w_head, w_in, w_out, out_row, out_head,
    K: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[:, h] = x[:, h] @ weight[h] for one head h, some rows and some outputs.

    The last argument of each group of strides that is not given is 1.
    """
    pdl.begin(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    n = tl.program_id(2) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, BLOCK_K)
    rows, columns = (row < M)[:, None], (n < N)[None, :]
    x_at = x + row.to(tl.int64)[:, None] * x_row + head * x_head + k[None, :]
    w_at = weight + head.to(tl.int64) * w_head + k[:, None] * w_in + n[None, :] * w_out
    acc = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
    for begin in range(0, K, BLOCK_K):
        left = tl.load(x_at + begin, mask=rows & (k < K - begin)[None, :], other=0.0)
        right = tl.load(w_at + begin * w_in, mask=columns & (k < K - begin)[:, None], other=0.0)
        acc = tl.dot(left, right, acc)
    target = out + row.to(tl.int64)[:, None] * out_row + head * out_head + n[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=rows & columns)


@triton.jit
def _scan(
    state, q, q_rope, query, pages, scales, table, begin, end, length, scale,
    RANK: tl.constexpr, ROPE: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Attend from rows at positions `query` to the latents of tiles begin to end (online softmax).

    Codes are multiplied in float16, their scales applied to scores and weights.
    """
    m, total, acc = state
    scaled: tl.constexpr = scales is not None
    if scaled:
        q, q_rope = q.to(tl.float16), q_rope.to(tl.float16)
    at, d, e = tl.arange(0, TILE), tl.arange(0, q.shape[1]), tl.arange(0, q_rope.shape[1])
    ahead = begin * TILE + at
    next_blocks = tl.load(table + ahead // SIZE, mask=ahead < length, other=0)
    for tile in range(begin, end):
        position = tile * TILE + at
        row = next_blocks.to(tl.int64) * SIZE + position % SIZE
        ahead = position + TILE
        next_blocks = tl.load(table + ahead // SIZE, mask=ahead < length, other=0)
        page = pages + row[:, None] * (RANK + ROPE)
        seen = (position < length)[:, None]
        low = tl.load(page + d[None, :], mask=seen & (d < RANK)[None, :], other=0.0)
        high = tl.load(page + RANK + e[None, :], mask=seen & (e < ROPE)[None, :], other=0.0)
        low, high = low.to(q.dtype), high.to(q.dtype)
        scores = tl.dot(q_rope, tl.trans(high), tl.dot(q, tl.trans(low))) * scale
        if scaled:
            of_token = tl.load(scales + row, mask=position < length, other=0.0)[None, :]
            scores *= of_token
        # One loop for all tiles: a second one without masks would need more registers.
        mask = (position[None, :] <= query[:, None]) & (position < length)[None, :]
        scores = tl.where(mask, scores, float("-inf"))
        top = tl.max(scores, 1)
        if scaled:
            top -= 8  # weights up to 256: times a small scale, smaller weights lose precision in float16
        m_new = tl.maximum(m, top)
        # A row without keys so far stays at -inf, and exp2(-inf - -inf) would be NaN.
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        weights = tl.exp2(scores - m_safe[:, None])
        shrink = tl.exp2(m - m_safe)
        total = total * shrink + tl.sum(weights, 1)
        if scaled:
            weights *= of_token
        acc = tl.dot(weights.to(low.dtype), low, acc * shrink[:, None])
        m = m_new
    return m, total, acc


@triton.jit
def _load_queries(
    queries, row, mask, RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr,
):  # fmt: skip
    """The parts of some query rows that meet latents and rotated keys."""
    at = queries + row.to(tl.int64)[:, None] * (RANK + ROPE)
    d, e = tl.arange(0, RANK_PAD)[None, :], tl.arange(0, ROPE_PAD)[None, :]
    q = tl.load(at + d, mask=mask[:, None] & (d < RANK), other=0.0)
    return q, tl.load(at + RANK + e, mask=mask[:, None] & (e < ROPE), other=0.0)


@triton.jit
def latent_decode_kernel(
    queries, pages, scales, out, split_out, split_max, split_sum, counters,
    singles, positions, token_slots, tables, table_stride, scale,
    NUM_Q: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr,
    ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
    SPLITS: tl.constexpr, MIN_TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One query token, HEADS of its heads, one split of the context."""
    pdl.begin(PDL)
    index, part, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(singles + index).to(tl.int64)
    length = tl.load(positions + token).to(tl.int32) + 1
    table = tables + tl.load(token_slots + token).to(tl.int64) * table_stride
    num_tiles = tl.cdiv(length, TILE)
    # A split of less than MIN_TILES would cost more to merge than to compute.
    per_split = tl.maximum(tl.cdiv(num_tiles, SPLITS), MIN_TILES)
    num_splits = tl.cdiv(num_tiles, per_split)
    begin = split * per_split
    end = tl.minimum(begin + per_split, num_tiles)
    if begin >= end:
        return
    head = part * HEADS + tl.arange(0, HEADS)
    mask = head < NUM_Q
    q, q_rope = _load_queries(queries, token * NUM_Q + head, mask, RANK, RANK_PAD, ROPE, ROPE_PAD)
    query = tl.zeros([HEADS], dtype=tl.int32) + (length - 1)
    state = _scan(
        _start(HEADS, RANK_PAD), q, q_rope, query, pages, scales, table, begin, end, length, scale,
        RANK, ROPE, SIZE, TILE,
    )  # fmt: skip
    _, total, acc = state
    d = tl.arange(0, RANK_PAD)[None, :]
    out_mask = mask[:, None] & (d < RANK)
    target = out + (token * NUM_Q + head)[:, None] * RANK + d
    if num_splits == 1:
        tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=out_mask)
    else:
        base = (index * NUM_Q + head) * SPLITS
        splits = (
            split_out + base.to(tl.int64)[:, None] * RANK + d,
            split_max + base,
            split_sum + base,
        )
        counter = counters + index * tl.cdiv(NUM_Q, HEADS) + part
        _store_split(state, splits, split, num_splits, counter, target, out_mask, mask, RANK)


@triton.jit
def latent_prefill_kernel(
    queries, pages, scales, out, tiles, tables, table_stride, scale,
    NUM_Q: tl.constexpr, NUM_Q_PAD: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr,
    ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS of a tile of a chunk: row r is token r // NUM_Q_PAD, head r % NUM_Q_PAD."""
    pdl.begin(PDL)
    tile = tl.program_id(0)
    token = tl.load(tiles + tile * 5).to(tl.int64)
    count = tl.load(tiles + tile * 5 + 1)
    slot = tl.load(tiles + tile * 5 + 2).to(tl.int64)
    start = tl.load(tiles + tile * 5 + 3)
    first = tl.program_id(1) * ROWS
    if first // NUM_Q_PAD >= count:
        return
    r = first + tl.arange(0, ROWS)
    step, head = r // NUM_Q_PAD, r % NUM_Q_PAD
    mask = (step < count) & (head < NUM_Q)
    rows = (token + step) * NUM_Q + head
    q, q_rope = _load_queries(queries, rows, mask, RANK, RANK_PAD, ROPE, ROPE_PAD)
    table = tables + slot * table_stride
    last = tl.minimum(count, (first + ROWS - 1) // NUM_Q_PAD + 1)
    length, query = start + last, start + step
    _, total, acc = _scan(
        _start(ROWS, RANK_PAD), q, q_rope, query, pages, scales, table, 0, tl.cdiv(length, TILE), length,
        scale, RANK, ROPE, SIZE, TILE,
    )  # fmt: skip
    d = tl.arange(0, RANK_PAD)[None, :]
    tl.store(
        out + rows.to(tl.int64)[:, None] * RANK + d,
        (acc / total[:, None]).to(out.dtype.element_ty),
        mask=mask[:, None] & (d < RANK),
    )
