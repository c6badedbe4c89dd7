"""Paged attention on CUDA: single queries with the context cut into parts, chunks in large tiles.

The query heads of a kv head are computed together, so that its keys and values are read once.
Block ids are loaded one tile ahead of the keys they lead to: otherwise Triton does not overlap the
loads of a tile with the arithmetic of the last. Lengths are read on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.batch import LayerKV, StepBatch

_LOG2_E = 1.4426950408889634
_TILE_ROWS = 128  # query rows (tokens x heads of a group) that one program takes


def tile_tokens(group: int) -> int:
    """How many tokens of a chunk go into one tile."""
    return _TILE_ROWS // triton.next_power_of_2(group)


@triton.jit
def _capped(scores, cap, CAPPED: tl.constexpr):
    """Scores are in units of log2; so is the cap."""
    if CAPPED:
        twice = tl.exp2(scores * (2 * 1.4426950408889634 / cap))
        scores = cap * (1 - 2 / (twice + 1))
    return scores


@triton.jit
def _attend(
    q, k_tile, v_tile, mask, m, total, acc, scale, cap, CAPPED: tl.constexpr, MASKED: tl.constexpr
):
    """One tile of keys for the running softmax (m, total, acc)."""
    scores = _capped(tl.dot(q, k_tile) * scale, cap, CAPPED)
    if MASKED:
        scores = tl.where(mask, scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1))
    # A row that has seen no key yet stays at -inf, and exp2(-inf - -inf) would be NaN.
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    weights = tl.exp2(scores - m_safe[:, None])
    shrink = tl.exp2(m - m_safe)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * shrink[:, None])
    return m_new, total, acc


@triton.jit
def _tiles(keys, values, base, position, d, seen, kind, DIM: tl.constexpr, SIZE: tl.constexpr):
    """Keys [dim, tile] and values [tile, dim] at positions of blocks that start at `base`."""
    page = (base + position % SIZE) * DIM
    k_mask = seen[None, :] & (d < DIM)[:, None]
    v_mask = seen[:, None] & (d < DIM)[None, :]
    k_tile = tl.load(keys + page[None, :] + d[:, None], mask=k_mask, other=0.0)
    v_tile = tl.load(values + page[:, None] + d[None, :], mask=v_mask, other=0.0)
    return k_tile.to(kind), v_tile.to(kind)


@triton.jit
def _join(part_out, part_max, part_sum, num_parts, mask, row_mask, DIM: tl.constexpr):
    """The softmax over all parts of a context, from their own maxima, sums and results."""
    m = tl.full([mask.shape[0]], float("-inf"), dtype=tl.float32)
    total = tl.zeros([mask.shape[0]], dtype=tl.float32)
    acc = tl.zeros(mask.shape, dtype=tl.float32)
    for part in range(num_parts):
        its_m = tl.load(part_max + part, mask=row_mask, other=0.0, cache_modifier=".cg")
        its_sum = tl.load(part_sum + part, mask=row_mask, other=1.0, cache_modifier=".cg")
        its_out = tl.load(part_out + part * DIM, mask=mask, other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m, its_m)
        old, new = tl.exp2(m - m_new), tl.exp2(its_m - m_new)
        total = total * old + its_sum * new
        acc = acc * old[:, None] + its_out * new[:, None]
        m = m_new
    return acc / total[:, None]


@triton.jit
def paged_decode_kernel(
    queries,
    keys,
    values,
    out,
    part_out,
    part_max,
    part_sum,
    counters,
    singles,
    positions,
    token_slots,
    tables,
    table_stride,
    scale,
    cap,
    window,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    ALL_SINGLES: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """One query token, one kv head, one part of the context."""
    index = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    token = index.to(tl.int64)
    if not ALL_SINGLES:
        token = tl.load(singles + index).to(tl.int64)
    length = tl.load(positions + token).to(tl.int32) + 1
    slot = tl.load(token_slots + token).to(tl.int64)
    first = 0
    if WINDOWED:
        first = tl.maximum(length - window, 0) // TILE
    num_tiles = tl.cdiv(length, TILE)
    # A part of less than MIN_TILES would cost more to join than to compute.
    per_split = tl.maximum(tl.cdiv(num_tiles - first, SPLITS), MIN_TILES)
    num_parts = tl.cdiv(num_tiles - first, per_split)
    start = first + split * per_split
    end = tl.minimum(start + per_split, num_tiles)

    g = tl.arange(0, 16)
    d = tl.arange(0, DIM_PAD)
    at = tl.arange(0, TILE)
    q_heads = head * GROUP + g
    q_mask = (g < GROUP)[:, None] & (d < DIM)[None, :]
    q_at = token * (NUM_Q * DIM) + q_heads[:, None] * DIM + d[None, :]
    q = tl.load(queries + q_at, mask=q_mask, other=0.0)
    m = tl.full([16], float("-inf"), dtype=tl.float32)
    total = tl.zeros([16], dtype=tl.float32)
    acc = tl.zeros([16, DIM_PAD], dtype=tl.float32)
    table = tables + slot * table_stride
    ahead = start * TILE + at
    next_blocks = tl.load(table + ahead // SIZE, mask=ahead < length, other=0)
    for tile in range(start, end):
        position = tile * TILE + at
        seen = position < length
        blocks = next_blocks.to(tl.int64)
        ahead = position + TILE
        next_blocks = tl.load(table + ahead // SIZE, mask=ahead < length, other=0)
        base = (blocks * NUM_KV + head) * SIZE
        k_tile, v_tile = _tiles(keys, values, base, position, d, seen, q.dtype, DIM, SIZE)
        mask = seen
        if WINDOWED:
            mask = mask & (position >= length - window)
        m, total, acc = _attend(
            q, k_tile, v_tile, mask[None, :], m, total, acc, scale, cap, CAPPED, True
        )
    if num_parts == 1:
        if split == 0:
            tl.store(out + q_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=q_mask)
    elif start < end:
        # The last part to finish joins them all; parts that have no tile take no part in it.
        base = (index * NUM_Q + q_heads) * SPLITS
        part_at = base.to(tl.int64)[:, None] * DIM + d[None, :]
        tl.store(part_out + part_at + split * DIM, acc, mask=q_mask)
        tl.store(part_max + base + split, m, mask=g < GROUP)
        tl.store(part_sum + base + split, total, mask=g < GROUP)
        tl.debug_barrier()
        counter = counters + index * NUM_KV + head
        if tl.atomic_add(counter, 1, sem="acq_rel") == num_parts - 1:
            joined = _join(
                part_out + part_at,
                part_max + base,
                part_sum + base,
                num_parts,
                q_mask,
                g < GROUP,
                DIM,
            )
            tl.store(out + q_at, joined.to(out.dtype.element_ty), mask=q_mask)
            tl.store(counter, 0)


@triton.jit
def paged_prefill_kernel(
    queries,
    keys,
    values,
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
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Some tokens of a chunk and one kv head: row r is token r // GROUP_PAD, head r % GROUP_PAD."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(tiles + tile * 4).to(tl.int64)
    count = tl.load(tiles + tile * 4 + 1)
    slot = tl.load(tiles + tile * 4 + 2).to(tl.int64)
    start = tl.load(tiles + tile * 4 + 3)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, DIM_PAD)
    at = tl.arange(0, TILE)
    step = r // GROUP_PAD
    g = r % GROUP_PAD
    q_mask = ((step < count) & (g < GROUP))[:, None] & (d < DIM)[None, :]
    q_at = (token + step)[:, None] * (NUM_Q * DIM) + (head * GROUP + g)[:, None] * DIM + d[None, :]
    q = tl.load(queries + q_at, mask=q_mask, other=0.0)
    query = start + step  # positions
    length = start + count
    m = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    acc = tl.zeros([ROWS, DIM_PAD], dtype=tl.float32)
    table = tables + slot * table_stride
    first = 0
    full = (start + 1) // TILE  # tiles that every row sees whole
    if WINDOWED:
        first = tl.maximum(start + 1 - window, 0) // TILE
        full = first
    ahead = first * TILE + at
    next_blocks = tl.load(table + ahead // SIZE, mask=ahead < length, other=0)
    for j in range(first, full):
        position = j * TILE + at
        blocks = next_blocks.to(tl.int64)
        ahead = position + TILE
        next_blocks = tl.load(table + ahead // SIZE, mask=ahead < length, other=0)
        base = (blocks * NUM_KV + head) * SIZE
        k_tile, v_tile = _tiles(keys, values, base, position, d, position >= 0, q.dtype, DIM, SIZE)
        m, total, acc = _attend(
            q,
            k_tile.to(q.dtype),
            v_tile.to(q.dtype),
            True,
            m,
            total,
            acc,
            scale,
            cap,
            CAPPED,
            False,
        )
    for j in range(full, tl.cdiv(length, TILE)):
        position = j * TILE + at
        seen = position < length
        blocks = next_blocks.to(tl.int64)
        ahead = position + TILE
        next_blocks = tl.load(table + ahead // SIZE, mask=ahead < length, other=0)
        base = (blocks * NUM_KV + head) * SIZE
        k_tile, v_tile = _tiles(keys, values, base, position, d, seen, q.dtype, DIM, SIZE)
        mask = position[None, :] <= query[:, None]
        if WINDOWED:
            mask = mask & (position[None, :] > query[:, None] - window)
        m, total, acc = _attend(q, k_tile, v_tile, mask, m, total, acc, scale, cap, CAPPED, True)
    tl.store(out + q_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=q_mask)


def attention(
    queries: Tensor,
    kv: LayerKV,
    batch: StepBatch,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Same contract as `reference.attention`."""
    assert batch.work is not None
    out = torch.empty_like(queries)
    in_log2 = (scale * _LOG2_E, (soft_cap or 1.0) * _LOG2_E)
    if batch.work.singles.shape[0]:
        _decode(out, queries, kv, batch, in_log2, window, soft_cap is not None)
    if batch.work.tiles.shape[0]:
        _prefill(out, queries, kv, batch, in_log2, window, soft_cap is not None)
    return out


def _decode_options(dim_pad: int, splits: int) -> dict[str, int]:
    """How the decode kernel is cut and compiled: small tiles where rows alone fill the device."""
    if splits == 1 or dim_pad > 128:
        return {
            "TILE": 32,
            "MIN_TILES": 1,
            "num_warps": 4,
            "num_stages": 4 if dim_pad <= 128 else 3,
        }
    return {"TILE": 64, "MIN_TILES": 2, "num_warps": 4, "num_stages": 3}


def _decode(
    out: Tensor,
    queries: Tensor,
    kv: LayerKV,
    batch: StepBatch,
    in_log2: tuple[float, float],
    window: int | None,
    capped: bool,
) -> None:
    work = batch.work
    assert work is not None
    _, num_kv, size, dim = kv.keys.shape
    num_q, count, splits = queries.shape[1], work.singles.shape[0], work.splits
    part_out = part_max = part_sum = out
    if splits > 1:
        shape = (count, num_q, splits)
        part_out = queries.new_empty((*shape, dim), dtype=torch.float32)
        part_max, part_sum = queries.new_empty((2, *shape), dtype=torch.float32)
    dim_pad = triton.next_power_of_2(dim)
    paged_decode_kernel[(count, num_kv, splits)](
        queries,
        kv.keys,
        kv.values,
        out,
        part_out,
        part_max,
        part_sum,
        work.counters,
        work.singles,
        batch.positions,
        batch.token_slots,
        batch.tables,
        batch.tables.stride(0),
        *in_log2,
        window or 0,
        NUM_Q=num_q,
        NUM_KV=num_kv,
        GROUP=num_q // num_kv,
        DIM=dim,
        DIM_PAD=dim_pad,
        SIZE=size,
        SPLITS=splits,
        ALL_SINGLES=count == queries.shape[0],
        WINDOWED=window is not None,
        CAPPED=capped,
        **_decode_options(dim_pad, splits),
    )


def _prefill_options(dim_pad: int) -> dict[str, int]:
    """How the prefill kernel is cut and compiled."""
    return {"TILE": 64 if dim_pad <= 128 else 32, "num_warps": 8, "num_stages": 3}


def _prefill(
    out: Tensor,
    queries: Tensor,
    kv: LayerKV,
    batch: StepBatch,
    in_log2: tuple[float, float],
    window: int | None,
    capped: bool,
) -> None:
    work = batch.work
    assert work is not None
    _, num_kv, size, dim = kv.keys.shape
    num_q = queries.shape[1]
    group = num_q // num_kv
    dim_pad = triton.next_power_of_2(dim)
    paged_prefill_kernel[(work.tiles.shape[0], num_kv)](
        queries,
        kv.keys,
        kv.values,
        out,
        work.tiles,
        batch.tables,
        batch.tables.stride(0),
        *in_log2,
        window or 0,
        NUM_Q=num_q,
        NUM_KV=num_kv,
        GROUP=group,
        GROUP_PAD=triton.next_power_of_2(group),
        DIM=dim,
        DIM_PAD=dim_pad,
        SIZE=size,
        ROWS=_TILE_ROWS,
        WINDOWED=window is not None,
        CAPPED=capped,
        **_prefill_options(dim_pad),
    )
