"""Attention of long prompt chunks on Hopper: the softmax of one warp group beside the GEMMs of the other.

A program has three partitions of warps. A producer warp copies keys and values by TMA; two consumer
warp groups own 64 queries each and take turns on the tensor cores. Within a group, the GEMM of the
scores of the next tile is issued before the GEMM of the weights and values of the last one, so that the
softmax overlaps with the latter. Written in Gluon: Triton cannot assign warps. chunk_attention.py has
the same kernel in Triton, for other GPUs and for what this one refuses.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from windlass.kernels.attention_options import AttentionOptions
from windlass.kernels.gpu import gpu_of

_LOG2_E = 1.4426950408889634
_GROUP_ROWS = 64  # queries of a warp group
_TILE = 128  # keys
_STAGES = 2
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 240, 24
_DIMS = ((64, 64, 0), (128, 128, 0), (128, 128, 64))  # of keys, values and the rotated part

_LAYOUT = gl.NVMMASharedLayout.get_default_for


@gluon.jit
def _copy_tile(matrix, row, column, tiles, at, bar):
    if matrix is not None:
        tma.async_copy_global_to_shared(matrix, [row, column], bar, tiles.index(at))


@gluon.jit
def _produce(sources, shared, bars, token, origin, columns, num_tiles):
    """Copy the queries, and the tiles of keys and values from the last to the first."""
    q, q_rope, keys, rope_keys, values = sources
    q_tiles, q_rope_tiles, k_tiles, k_rope_tiles, v_tiles = shared
    q_filled, k_filled, v_filled, k_free, v_free, _ = bars
    q_column, rope_column, key_column, value_column = columns
    STAGES: gl.constexpr = k_tiles.shape[0]
    ROWS: gl.constexpr = q.block_type.shape[0]
    TILE: gl.constexpr = keys.block_type.shape[0]
    q_bytes: gl.constexpr = q.block_type.nbytes
    k_bytes: gl.constexpr = keys.block_type.nbytes
    rope_bytes: gl.constexpr = 0 if rope_keys is None else rope_keys.block_type.nbytes
    for each in gl.static_range(2):
        bar = q_filled.index(each)
        mbarrier.expect(bar, q_bytes + rope_bytes * ROWS // TILE)
        _copy_tile(q, token + each * ROWS, q_column, q_tiles, each, bar)
        _copy_tile(q_rope, token + each * ROWS, rope_column, q_rope_tiles, each, bar)
    for at in range(num_tiles):
        stage = at % STAGES
        phase = (at // STAGES) & 1
        first = origin + (num_tiles - 1 - at) * TILE
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        mbarrier.expect(k_filled.index(stage), k_bytes + rope_bytes)
        _copy_tile(keys, first, key_column, k_tiles, stage, k_filled.index(stage))
        _copy_tile(rope_keys, first, 0, k_rope_tiles, stage, k_filled.index(stage))
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        mbarrier.expect(v_filled.index(stage), values.block_type.nbytes)
        _copy_tile(values, first, value_column, v_tiles, stage, v_filled.index(stage))


@gluon.jit
def _start_scores(shared, stage, WHICH: gl.constexpr, layout: gl.constexpr):
    """Start the GEMMs of the group's queries and a tile of keys."""
    q_tiles, q_rope_tiles, k_tiles, k_rope_tiles, _ = shared
    ROWS: gl.constexpr = q_tiles.shape[1]
    TILE: gl.constexpr = k_tiles.shape[1]
    keys = k_tiles.index(stage).permute((1, 0))
    empty = gl.zeros([ROWS, TILE], gl.float32, layout)
    scores = warpgroup_mma(q_tiles.index(WHICH), keys, empty, use_acc=False, is_async=True)
    if q_rope_tiles is not None:
        rotated = k_rope_tiles.index(stage).permute((1, 0))
        scores = warpgroup_mma(q_rope_tiles.index(WHICH), rotated, scores, is_async=True)
    return scores


@gluon.jit
def _masked(scores, tile, query, num_keys):
    """Scores of the keys of `tile`, -inf for those past `num_keys` or after the query."""
    TILE: gl.constexpr = scores.shape[1]
    layout: gl.constexpr = scores.type.layout
    position = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(0, layout))
    rows = query + gl.arange(0, scores.shape[0], gl.SliceLayout(1, layout))
    seen = (position < num_keys)[None, :] & (position[None, :] <= rows[:, None])
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def _column(rows, layout: gl.constexpr):
    return gl.convert_layout(rows, gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def _softmax(scores, m, total, scale, operand: gl.constexpr, dtype: gl.constexpr):
    """One step of the online softmax: weights, the new state, and what older sums are multiplied by."""
    m_new = gl.maximum(m, gl.max(scores, 1) * scale)
    # A row without keys so far stays at -inf, and exp2(-inf - -inf) would be NaN.
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    weights = gl.exp2(scores * scale - m_safe[:, None])
    shrink = gl.exp2(m - m_safe)
    total = total * shrink + gl.sum(weights, 1)
    return gl.convert_layout(weights.to(dtype), operand), m_new, total, shrink


@gluon.jit
def _zero_rows(tile, count):
    """Zero the rows of a tile from `count` on; a weight of zero does not hide a NaN."""
    TILE: gl.constexpr = tile.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    values = tile.load(layout)
    tile.store(gl.where((rows < count)[:, None], values, gl.zeros_like(values)))
    fence_async_shared()


@gluon.jit
def _scan(state, weights, shared, bars, num_tiles, scale, WHICH: gl.constexpr):
    """All tiles but the first: the scores of a tile, and the values of the tile before it."""
    _, _, k_tiles, _, v_tiles = shared
    _, k_filled, v_filled, k_free, v_free, turns = bars
    m, total, acc = state
    STAGES: gl.constexpr = k_tiles.shape[0]
    dtype: gl.constexpr = k_tiles.dtype
    operand: gl.constexpr = weights.type.layout
    layout: gl.constexpr = acc.type.layout
    score_layout: gl.constexpr = m.type.layout.parent
    for step in range(1, num_tiles):
        stage, phase = step % STAGES, (step // STAGES) & 1
        last, last_phase = (step - 1) % STAGES, ((step - 1) // STAGES) & 1
        mbarrier.wait(k_filled.index(stage), phase)
        mbarrier.wait(turns.index(WHICH), (step & 1) ^ (1 - WHICH))
        scores = _start_scores(shared, stage, WHICH, score_layout)
        mbarrier.wait(v_filled.index(last), last_phase)
        acc = warpgroup_mma(weights, v_tiles.index(last), acc, is_async=True)
        mbarrier.arrive(turns.index(1 - WHICH), count=1)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_free.index(stage), count=1)
        new_weights, m, total, shrink = _softmax(scores, m, total, scale, operand, dtype)
        acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
        mbarrier.arrive(v_free.index(last), count=1)
        acc = acc * _column(shrink, layout)
        weights = new_weights
    return m, total, acc, weights


@gluon.jit
def _consume(
    shared, bars, sinks, out, sums, work, scale,
    NUM_Q: gl.constexpr, CACHED: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Attend from the 64 queries of this warp group, and store its rows of `out`."""
    q_tiles, _, k_tiles, _, v_tiles = shared
    token, count, head, query, num_keys, num_tiles = work
    q_filled, k_filled, v_filled, k_free, _, turns = bars
    ROWS: gl.constexpr = q_tiles.shape[1]
    DIM: gl.constexpr = v_tiles.shape[2]
    TILE: gl.constexpr = k_tiles.shape[1]
    STAGES: gl.constexpr = k_tiles.shape[0]
    dtype: gl.constexpr = k_tiles.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    r = WHICH * ROWS + gl.arange(0, ROWS, row_layout)
    inside = r < count
    m = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
    total = gl.zeros([ROWS], gl.float32, row_layout)
    acc = gl.zeros([ROWS, DIM], gl.float32, layout)
    out_rows = WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    d = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    out_at = out + ((token + out_rows).to(gl.int64) * NUM_Q + head)[:, None] * DIM + d[None, :]
    stored = (out_rows < count)[:, None]
    mbarrier.wait(q_filled.index(WHICH), 0)
    mbarrier.wait(k_filled.index(0), 0)
    mbarrier.wait(turns.index(WHICH), 1 - WHICH)
    scores = _start_scores(shared, 0, WHICH, score_layout)
    mbarrier.arrive(turns.index(1 - WHICH), count=1)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_free.index(0), count=1)
    scores = _masked(scores, num_tiles - 1, query + WHICH * ROWS, num_keys)
    weights, m, total, shrink = _softmax(scores, m, total, scale, operand, dtype)
    if not CACHED:
        # Rows behind the last key may be another request's. TMA fills those behind a tensor with 0.
        valid = num_keys - (num_tiles - 1) * TILE
        if valid < TILE:
            mbarrier.wait(v_filled.index(0), 0)
            _zero_rows(v_tiles.index(0), valid)
    m, total, acc, weights = _scan((m, total, acc), weights, shared, bars, num_tiles, scale, WHICH)
    last = (num_tiles - 1) % STAGES
    mbarrier.wait(v_filled.index(last), ((num_tiles - 1) // STAGES) & 1)
    acc = warpgroup_mma(weights, v_tiles.index(last), acc, is_async=True)
    acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
    if sums is not None:
        # Merge with the result of the keys so far.
        sums_at = sums + (token + r).to(gl.int64) * NUM_Q + head
        sum_before = gl.load(sums_at, mask=inside, other=float("-inf"))
        before = gl.load(out_at, mask=stored, other=0.0).to(gl.float32)
        top = gl.maximum(m, sum_before)
        top = gl.where(top == float("-inf"), 0.0, top)
        shrink, share = gl.exp2(m - top), gl.exp2(sum_before - top)
        m, total = top, total * shrink + share
        before = gl.where(_column(share > 0.0, layout), before, 0.0)  # uninitialised
        acc = acc * _column(shrink, layout) + before * _column(share, layout)
        if CACHED:
            gl.store(sums_at, m + gl.log2(total), mask=inside)
    if sinks is not None:
        sink = gl.load(sinks + head) * 1.4426950408889634
        top = gl.maximum(m, sink)
        shrink = gl.exp2(m - top)
        total = total * shrink + gl.exp2(sink - top)
        acc = acc * _column(shrink, layout)
    total = gl.where(inside, total, 1.0)
    acc = acc / _column(total, layout)
    gl.store(out_at, acc.to(out.dtype.element_ty), mask=stored)


@gluon.jit
def _tiles_of(matrix, NUM: gl.constexpr):
    """Shared memory for NUM tiles of a matrix."""
    ROWS: gl.constexpr = matrix.block_type.shape[0]
    DIM: gl.constexpr = matrix.block_type.shape[1]
    return gl.allocate_shared_memory(matrix.dtype, [NUM, ROWS, DIM], matrix.layout)


@gluon.jit
def _barriers(NUM: gl.constexpr, COUNT: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for each in gl.static_range(NUM):
        mbarrier.init(bars.index(each), count=COUNT)
    return bars


@gluon.jit(do_not_specialize=["num_keys"])
def hopper_attention_kernel(
    q, q_rope, keys, rope_keys, values, sinks, out, sums, tiles, num_keys, scale,
    q_head, rope_head, key_head, value_head,
    NUM_Q: gl.constexpr, GROUP: gl.constexpr, CACHED: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """A tile of a chunk and one query head; arguments as of `chunk_attention_kernel`.

    Tiles of queries and of keys have the same length, so that only the last tile of keys is masked.
    """
    TILE: gl.constexpr = keys.block_type.shape[0]
    # The last queries of a chunk have the most keys: first, so that the last programs are short.
    tile, head = gl.num_programs(0) - 1 - gl.program_id(0), gl.program_id(1)
    token = gl.load(tiles + tile * 4)
    count = gl.load(tiles + tile * 4 + 1)
    origin = 0
    query = num_keys
    end = num_keys
    if not CACHED:
        origin = gl.load(tiles + tile * 4 + 2)
        query = gl.load(tiles + tile * 4 + 3)
        end = query + count
    num_tiles = gl.cdiv(end, TILE)
    kv_head = head // GROUP
    q_rope_tiles, k_rope_tiles = None, None
    if q_rope is not None:
        q_rope_tiles = _tiles_of(q_rope, 2)
        k_rope_tiles = _tiles_of(rope_keys, STAGES)
    k_tiles, v_tiles = _tiles_of(keys, STAGES), _tiles_of(values, STAGES)
    shared = (_tiles_of(q, 2), q_rope_tiles, k_tiles, k_rope_tiles, v_tiles)
    bars = (
        _barriers(2, 1), _barriers(STAGES, 1), _barriers(STAGES, 1),
        _barriers(STAGES, 2), _barriers(STAGES, 2), _barriers(2, 1),
    )  # fmt: skip
    work = (token, count, head, query, end, num_tiles)
    columns = (head * q_head, head * rope_head, kv_head * key_head, kv_head * value_head)
    sources = (q, q_rope, keys, rope_keys, values)
    gl.warp_specialize(
        [
            (_consume, (shared, bars, sinks, out, sums, work, scale, NUM_Q, CACHED, 0)),
            (_consume, (shared, bars, sinks, out, sums, work, scale, NUM_Q, CACHED, 1)),
            (_produce, (sources, shared, bars, token, origin, columns, num_tiles)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def refuse(q: Tensor, value_dim: int, rope: int, options: AttentionOptions) -> str | None:
    """Why the kernel refuses a layer with such queries [tokens, heads, dim], or None."""
    dim = q.shape[2]
    if not q.is_cuda:
        return f"Gluon kernels need CUDA, this is {q.device.type}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"needs a 16-bit dtype, this is {q.dtype}"
    if (dim, value_dim, rope) not in _DIMS:
        return (
            f"heads of {dim} + {rope} and {value_dim} numbers; the kernel takes 64, 128, 128 + 64"
        )
    if options.soft_cap is not None:
        return "the kernel has no soft cap"
    return gpu_of(q.device).lacks_warpgroups()


def attend(
    queries: tuple[Tensor, Tensor | None],
    keys: tuple[Tensor, Tensor | None],
    values: Tensor,
    out: Tensor,
    tiles: Tensor,
    options: AttentionOptions,
    *,
    sums: Tensor | None,
    cached: bool,
) -> None:
    """`chunk_attention.attend` for layers that `refuse` takes; queries and keys with rotated parts."""
    (q, q_rope), (k, rope_keys) = queries, keys
    num_q = q.shape[1]
    hopper_attention_kernel[(tiles.shape[0], num_q)](
        _descriptor(q, _GROUP_ROWS),
        None if q_rope is None else _descriptor(q_rope, _GROUP_ROWS),
        _descriptor(k, _TILE),
        None if rope_keys is None else _descriptor(rope_keys[:, None], _TILE),
        _descriptor(values, _TILE),
        None if cached else options.sinks,  # after the last keys
        out,
        sums,
        tiles,
        k.shape[0] if cached else 0,
        options.scale * _LOG2_E,
        q.stride(1),
        0 if q_rope is None else q_rope.stride(1),
        k.stride(1),
        values.stride(1),
        NUM_Q=num_q,
        GROUP=num_q // k.shape[1],
        CACHED=cached,
        STAGES=_STAGES,
        CONSUMER_REGISTERS=_CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=_PRODUCER_REGISTERS,
        num_warps=4,
    )


def matrix_of(values: Tensor) -> tuple[list[int], list[int]]:
    """The shape and strides of [tokens, heads, dim] as a matrix [tokens, ...]."""
    tokens, heads, dim = values.shape
    return [tokens, (heads - 1) * values.stride(1) + dim], [values.stride(0), 1]


def _descriptor(values: Tensor, rows: int) -> TensorDescriptor:
    """Of tiles of `rows` tokens and one head."""
    box = [rows, values.shape[2]]
    kind = gl.bfloat16 if values.dtype == torch.bfloat16 else gl.float16
    return TensorDescriptor(values, *matrix_of(values), box, _LAYOUT(box, kind))
