"""The kernels of attention.py: split-KV decode for single queries, tiled prefill for chunks.

A program computes all query heads of a kv head, so keys and values are read once. Block ids are
loaded one tile ahead of the keys that they address: otherwise Triton does not overlap the loads of a
tile with the arithmetic of the previous tile. Lengths are read on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from windlass.kernels.triton import pdl
from windlass.kernels.triton.decode_query import (
    attend_self,
    decode_query,
    is_sibling,
    soft_capped,
)

SERIAL_SPLITS = tl.constexpr(16)  # more splits are merged all at once


@triton.jit
def _scales(at, seen, MASKED: tl.constexpr):
    """Load the scales of a tile's positions."""
    if MASKED:
        return tl.load(at, mask=seen, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _last_hidden(position, window, CHUNKED: tl.constexpr):
    """The last position that a query does not see: behind its window, or before its chunk."""
    if CHUNKED:
        return position - position % window - 1
    else:
        return position - window


@triton.jit
def _scan(
    state,
    q,
    query,
    pages,
    table,
    origin,
    head,
    begin,
    end,
    length,
    hidden,
    scale,
    cap,
    NUM_KV: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Attend from rows q at positions `query` to the keys of tiles begin to end (online softmax).

    `state` is (maximum, sum of weights, weighted values). WINDOWED: a row does not see positions up to its
    `hidden`. Not MASKED: every row attends to every key.
    `table` maps positions to pages, which are STRIDE vectors apart; without a table, keys are contiguous by token from `origin`. Pages
    with scales hold codes. These are multiplied in float16, to which a GPU converts e4m3 directly; key
    scales are applied to the scores, value scales to the weights.
    """
    m, total, acc = state
    keys, values, key_scales, value_scales = pages
    scaled: tl.constexpr = key_scales is not None
    if scaled:
        q = q.to(tl.float16)
    at = tl.arange(0, TILE)
    d = tl.arange(0, q.shape[1])
    last = tl.minimum(query, length - 1)
    hidden_by_all = -1  # its page may be another row's
    if WINDOWED:
        hidden_by_all = tl.min(hidden, 0)
    ahead = begin * TILE + at
    if table is not None:
        next_blocks = tl.load(table + ahead // SIZE, mask=ahead < length, other=0)
    for tile in range(begin, end):
        position = tile * TILE + at
        seen = position < length
        if WINDOWED:
            seen = seen & (position > hidden_by_all)
        if table is None:
            row = (origin + position) * NUM_KV + head
        else:
            # Scale indices fit in 32 bits.
            blocks = next_blocks if scaled else next_blocks.to(tl.int64)
            ahead = position + TILE
            next_blocks = tl.load(table + ahead // SIZE, mask=ahead < length, other=0)
            row = blocks * STRIDE + head * SIZE + position % SIZE
        page = row.to(tl.int64) * DIM
        k_mask = (d < DIM)[:, None]
        v_mask = (d < DIM)[None, :]
        if MASKED:
            k_mask = k_mask & seen[None, :]
            v_mask = v_mask & seen[:, None]
        k_tile = tl.load(keys + page[None, :] + d[:, None], mask=k_mask, other=0.0).to(q.dtype)
        v_tile = tl.load(values + page[:, None] + d[None, :], mask=v_mask, other=0.0).to(q.dtype)
        scores = tl.dot(q, k_tile) * scale
        if scaled:
            scores *= _scales(key_scales + row, seen, MASKED)[None, :]
        scores = soft_capped(scores, cap, CAPPED)
        if MASKED:
            mask = position[None, :] <= last[:, None]
            if WINDOWED:
                mask = mask & (position[None, :] > hidden[:, None])
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
            weights *= _scales(value_scales + row, seen, MASKED)[None, :]
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * shrink[:, None])
        m = m_new
    return m, total, acc


@triton.jit
def _causal(
    state, q, query, pages, table, origin, head, first, seen, length, hidden, scale, cap,
    NUM_KV: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr,
    TILE: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, BATCH_INVARIANT: tl.constexpr,
):  # fmt: skip
    """Attend to the keys from tile `first` to `length`; keys before `seen` need no mask.

    Windowed and BATCH_INVARIANT kernels mask all tiles: the compiler rounds unmasked tiles
    differently.
    """
    unmasked_end = first if WINDOWED or BATCH_INVARIANT else seen // TILE
    state = _scan(
        state, q, query, pages, table, origin, head, first, unmasked_end, length, hidden, scale, cap,
        NUM_KV, DIM, SIZE, STRIDE, TILE, False, WINDOWED, CAPPED,
    )  # fmt: skip
    return _scan(
        state, q, query, pages, table, origin, head, unmasked_end, tl.cdiv(length, TILE), length, hidden,
        scale, cap, NUM_KV, DIM, SIZE, STRIDE, TILE, True, WINDOWED, CAPPED,
    )  # fmt: skip


@triton.jit
def _start(ROWS: tl.constexpr, DIM_PAD: tl.constexpr):
    """Initial softmax state."""
    m = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    return m, tl.zeros([ROWS], dtype=tl.float32), tl.zeros([ROWS, DIM_PAD], dtype=tl.float32)


@triton.jit
def _result(state, sinks, heads, row_mask):
    """The weighted values over the sum of weights, to which each head's sink adds one weight."""
    m, total, acc = state
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=row_mask, other=0.0) * 1.4426950408889634
        top = tl.maximum(m, sink)
        shrink = tl.exp2(m - top)
        total = total * shrink + tl.exp2(sink - top)
        acc *= shrink[:, None]
    return acc / total[:, None]


@triton.jit
def _merge_splits(split_out, split_max, split_sum, num_splits, mask, row_mask, DIM: tl.constexpr):
    """Merge the softmax states of all splits of a context."""
    m = tl.full([mask.shape[0]], float("-inf"), dtype=tl.float32)
    total = tl.zeros([mask.shape[0]], dtype=tl.float32)
    acc = tl.zeros(mask.shape, dtype=tl.float32)
    for split in range(num_splits):
        m_split = tl.load(split_max + split, mask=row_mask, other=0.0, cache_modifier=".cg")
        sum_split = tl.load(split_sum + split, mask=row_mask, other=1.0, cache_modifier=".cg")
        out_split = tl.load(split_out + split * DIM, mask=mask, other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m, m_split)
        old, new = tl.exp2(m - m_new), tl.exp2(m_split - m_new)
        total = total * old + sum_split * new
        acc = acc * old[:, None] + out_split * new[:, None]
        m = m_new
    return m, total, acc


@triton.jit
def _merge_heads(
    splits, first, num_splits, out, sinks, head,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge many splits, whose states begin at `first`: all of them at once, for one head at a time."""
    split_out, split_max, split_sum = splits
    split, d, one = tl.arange(0, SPLITS), tl.arange(0, DIM_PAD), tl.arange(0, 1)
    inside = split < num_splits
    for each in tl.static_range(GROUP):
        at = first + each * SPLITS + split
        m = tl.load(split_max + at, mask=inside, other=float("-inf"), cache_modifier=".cg")
        total = tl.load(split_sum + at, mask=inside, other=0.0, cache_modifier=".cg")
        mask = inside[:, None] & (d < DIM)[None, :]
        values_at = split_out + at.to(tl.int64)[:, None] * DIM + d[None, :]
        values = tl.load(values_at, mask=mask, other=0.0, cache_modifier=".cg")
        top = tl.max(m, 0)
        weights = tl.exp2(m - top)
        acc = tl.sum(values * weights[:, None], 0)[None, :]
        state = (one + top, one + tl.sum(weights * total, 0), acc)
        merged = _result(state, sinks, one + head + each, one == 0)
        tl.store(
            out + each * DIM + d[None, :], merged.to(out.dtype.element_ty), mask=(d < DIM)[None, :]
        )


@triton.jit
def _store_state(state, splits, split, mask, row_mask, DIM: tl.constexpr):
    m, total, acc = state
    split_out, split_max, split_sum = splits
    tl.store(split_out + split * DIM, acc, mask=mask)
    tl.store(split_max + split, m, mask=row_mask)
    tl.store(split_sum + split, total, mask=row_mask)
    tl.debug_barrier()


@triton.jit
def _store_split(
    state, splits, split, num_splits, counter, out, mask, row_mask, DIM: tl.constexpr,
    sinks=None, heads=None,
):  # fmt: skip
    """Store the state of one split; the last program to finish merges all splits."""
    split_out, split_max, split_sum = splits
    _store_state(state, splits, split, mask, row_mask, DIM)
    if tl.atomic_add(counter, 1, sem="acq_rel") == num_splits - 1:
        merged = _merge_splits(split_out, split_max, split_sum, num_splits, mask, row_mask, DIM)
        merged = _result(merged, sinks, heads, row_mask)
        tl.store(out, merged.to(out.dtype.element_ty), mask=mask)
        tl.store(counter, 0)


@triton.jit(do_not_specialize=["width", "spare"])
def paged_decode_kernel(
    queries, q_rows, q_columns, cos_sin, q_weight, k_weight, sinks, eps,
    keys, values, key_scales, value_scales,
    out, split_out, split_max, split_sum, counters, singles, positions, token_slots, tables,
    table_stride, scale, cap, window, width, spare,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, MIN_TILES: tl.constexpr, NEW: tl.constexpr,
    SIBLINGS: tl.constexpr, ALL_SINGLES: tl.constexpr, RAW: tl.constexpr, ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, PER_HEAD: tl.constexpr,
    WINDOWED: tl.constexpr, CHUNKED: tl.constexpr, CAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One query token, one kv head, one split of the context.

    RAW: `queries` are the outputs of the QKV GEMM. The kernel rotates them and writes the token's key
    and value. NEW > 1: a row has `width` adjacent tokens, up to NEW, and a token also writes the keys and
    values of the tokens before it in its row. The last SIBLINGS tokens of a row are alternatives to the second.
    """
    pdl.begin(PDL)
    index, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = (index if ALL_SINGLES else tl.load(singles + index)).to(tl.int64)
    position = tl.load(positions + token).to(tl.int32)
    length = position + 1
    if SIBLINGS > 0:
        length -= is_sibling(token, position, width, SIBLINGS)
    table = tables + tl.load(token_slots + token).to(tl.int64) * table_stride
    first, hidden = 0, 0
    if WINDOWED:
        hidden = _last_hidden(position, window, CHUNKED)
        first = tl.maximum(hidden + 1, 0) // TILE
    num_tiles = tl.maximum(tl.cdiv(length, TILE), first + 1)  # a sibling may see only itself
    # A split of less than MIN_TILES would cost more to merge than to compute.
    per_split = tl.maximum(tl.cdiv(num_tiles - first, SPLITS), MIN_TILES)
    num_splits = tl.cdiv(num_tiles - first, per_split)
    start = first + split * per_split
    end = tl.minimum(start + per_split, num_tiles)
    if start >= end:
        return

    g, d = tl.arange(0, 16), tl.arange(0, DIM_PAD)
    q_heads = head * GROUP + g
    q_mask = (g < GROUP)[:, None] & (d < DIM)[None, :]
    q_at = token * (NUM_Q * DIM) + q_heads[:, None] * DIM + d[None, :]
    pages = (keys, values, key_scales, value_scales)
    qkv = (queries + token * ((GROUP + 2) * NUM_KV * DIM), q_rows, q_columns, token)
    last = end == num_tiles
    if RAW:
        q = decode_query(
            *(qkv, pages, cos_sin, (q_weight, k_weight), table, head, position),
            *(start * TILE, end * TILE, last, g, d, eps, width, spare),
            *(NUM_KV, GROUP, DIM, SIZE, STRIDE, NEW, SIBLINGS, ROTATED, INTERLEAVED, NORM),
            PER_HEAD,
        )
    else:
        q = tl.load(queries + q_at, mask=q_mask, other=0.0)
    zeros = tl.zeros([16], dtype=tl.int32)
    state = _scan(
        *(_start(16, DIM_PAD), q, zeros + position, pages, table, None, head, start, end, length),
        *(zeros + hidden, scale, cap, NUM_KV, DIM, SIZE, STRIDE, TILE, True, WINDOWED, CAPPED),
    )
    if SIBLINGS > 0:
        state = attend_self(
            *(state, last & (length <= position), q, qkv, cos_sin, k_weight, head, position),
            *(g, d, eps, scale, cap, NUM_KV, GROUP, DIM, ROTATED, INTERLEAVED, NORM, PER_HEAD),
            CAPPED,
        )
    if num_splits == 1:
        target = out + q_at
        result = _result(state, sinks, q_heads, g < GROUP)
        tl.store(target, result.to(out.dtype.element_ty), mask=q_mask)
    else:
        base = (index * NUM_Q + q_heads) * SPLITS
        at = base.to(tl.int64)[:, None] * DIM + d[None, :]
        splits = (split_out + at, split_max + base, split_sum + base)
        counter = counters + index * NUM_KV + head
        if SPLITS <= SERIAL_SPLITS:
            _store_split(
                *(state, splits, split, num_splits, counter, out + q_at, q_mask, g < GROUP, DIM),
                *(sinks, q_heads),
            )
        else:
            _store_state(state, splits, split, q_mask, g < GROUP, DIM)
            if tl.atomic_add(counter, 1, sem="acq_rel") == num_splits - 1:
                first_head = head * GROUP
                _merge_heads(
                    (split_out, split_max, split_sum), (index * NUM_Q + first_head) * SPLITS,
                    num_splits, out + token * (NUM_Q * DIM) + first_head * DIM, sinks, first_head,
                    GROUP, DIM, DIM_PAD, SPLITS,
                )  # fmt: skip
                tl.store(counter, 0)


@triton.jit
def paged_prefill_kernel(
    queries,
    keys,
    values,
    key_scales,
    value_scales,
    new_keys,
    new_values,
    sinks,
    out,
    tiles,
    tables,
    table_stride,
    scale,
    cap,
    window,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr,
    CAPPED: tl.constexpr,
    BATCH_INVARIANT: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows of a tile of a chunk and one kv head: row r is token r // GROUP_PAD, head r % GROUP_PAD.

    If pages hold codes, `new_keys` and `new_values` may have the chunk's own keys and values before
    quantisation.
    """
    pdl.begin(PDL)
    tile = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(tiles + tile * 5).to(tl.int64)
    count = tl.load(tiles + tile * 5 + 1)
    slot = tl.load(tiles + tile * 5 + 2).to(tl.int64)
    start = tl.load(tiles + tile * 5 + 3)
    begin = tl.program_id(2) * ROWS // GROUP_PAD  # the first token
    if begin >= count:
        return
    r = tl.arange(0, ROWS)
    d = tl.arange(0, DIM_PAD)
    step = begin + r // GROUP_PAD
    g = r % GROUP_PAD
    q_mask = ((step < count) & (g < GROUP))[:, None] & (d < DIM)[None, :]
    q_at = (token + step)[:, None] * (NUM_Q * DIM) + (head * GROUP + g)[:, None] * DIM + d[None, :]
    q = tl.load(queries + q_at, mask=q_mask, other=0.0)
    pages = (keys, values, key_scales, value_scales)
    table = tables + slot * table_stride
    state = _start(ROWS, DIM_PAD)
    hidden = start + step
    first_seen = 0
    if WINDOWED:
        hidden = _last_hidden(hidden, window, CHUNKED)
        first_seen = tl.maximum(_last_hidden(start + begin, window, CHUNKED) + 1, 0)
    base = 0  # position of the first key of the second pass
    origin = None
    if new_keys is not None:
        base = tl.load(tiles + tile * 5 + 4)
        origin = token - (start - base)
        state = _causal(
            state, q, start + step, pages, table, None, head, first_seen // TILE, base, base, hidden,
            scale, cap,
            NUM_KV, DIM, SIZE, STRIDE, TILE, WINDOWED, CAPPED, BATCH_INVARIANT,
        )  # fmt: skip
        pages = (new_keys, new_values, None, None)
        table = None
    query = start - base + step
    first = 0
    if WINDOWED:
        first = tl.maximum(first_seen - base, 0) // TILE
    m, total, acc = _causal(
        state, q, query, pages, table, origin, head, first, start - base + begin + 1,
        start - base + count, hidden - base, scale, cap, NUM_KV, DIM, SIZE, STRIDE, TILE, WINDOWED, CAPPED, BATCH_INVARIANT,
    )  # fmt: skip
    total = tl.where(total == 0, 1.0, total)  # rows past the chunk's end have no keys
    target = out + q_at
    result = _result((m, total, acc), sinks, head * GROUP + g, (step < count) & (g < GROUP))
    tl.store(target, result.to(out.dtype.element_ty), mask=q_mask)
