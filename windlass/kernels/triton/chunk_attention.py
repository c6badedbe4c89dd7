"""Attention of long prompt chunks on CUDA, over contiguous keys and values that the TMA copies.

A chunk attends to the step's own keys, which are contiguous already, and first to cached tokens before
it, which are gathered from their pages piece by piece. Copying costs little against the arithmetic of
hundreds of queries per key. The softmax state between pieces is the output so far, and the logarithm of
its sum of weights. Hopper GPUs run the kernel of hopper_attention.py where it takes the layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from windlass.kernels.attention_options import AttentionOptions
from windlass.kernels.batch import CachedContext, LayerKV, StepBatch
from windlass.kernels.triton import hopper_attention, pdl
from windlass.kernels.triton.attention_kernels import _result
from windlass.kernels.triton.decode_query import soft_capped
from windlass.kernels.triton.fit import fit

_LOG2_E = 1.4426950408889634
_ROWS = 128  # tokens of a tile
_MIN_PIECE = 2048  # cached tokens that are gathered at a time
# Pieces of a whole context are longer: each costs a wave of programs that is not full, and a merge.
LONG_PIECE = 4  # times the tokens of the step
_GATHERED = 16  # tokens per program of a gather
_DIMS = (64, 128)  # of heads; accumulators of more would not fit


@triton.jit
def _scan(
    state, q, q_rope, query, keys, rope_keys, values, origin, key_column, value_column,
    begin, end, num_keys, scale, cap, TILE: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Attend from rows at positions `query` to the keys of tiles begin to end (online softmax)."""
    m, total, acc = state
    for tile in range(begin, end):
        row = origin + tile * TILE
        scores = tl.dot(q, keys.load([row, key_column]).T)
        if rope_keys is not None:
            scores = tl.dot(q_rope, rope_keys.load([row, 0]).T, scores)
        value = values.load([row, value_column])
        factor = scale
        if CAPPED:
            scores = soft_capped(scores * scale, cap, True)
            factor = 1.0
        if MASKED:
            position = tile * TILE + tl.arange(0, TILE)
            seen = position < num_keys
            scores = tl.where(
                seen[None, :] & (position[None, :] <= query[:, None]), scores, float("-inf")
            )
            value = tl.where(
                seen[:, None], value, 0.0
            )  # rows behind the last may be another request's
        m_new = tl.maximum(m, tl.max(scores, 1) * factor)
        # A row without keys so far stays at -inf, and exp2(-inf - -inf) would be NaN.
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        weights = tl.exp2(scores * factor - m_safe[:, None])
        shrink = tl.exp2(m - m_safe)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None])
        m = m_new
    return m, total, acc


@triton.jit(do_not_specialize=["num_keys"])
def chunk_attention_kernel(
    q, q_rope, keys, rope_keys, values, sinks, out, sums, tiles, num_keys, scale, cap,
    q_token, q_head, rope_token, rope_head, key_head, value_head,
    NUM_Q: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr,
    VALUE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, CACHED: tl.constexpr,
    CAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of a chunk and one query head; `keys`, `rope_keys` and `values` are tensor descriptors.

    CACHED: the keys are `num_keys` cached tokens before the chunk; else they are the step's own. `sums`
    [tokens, heads] has the logarithms of the sums of weights so far, and -inf for rows without.
    """
    pdl.begin(PDL)
    tile, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(tiles + tile * 4).to(tl.int64)
    count = tl.load(tiles + tile * 4 + 1)
    r, d, v = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, VALUE)
    inside = r < count
    rows = (token + r)[:, None]
    q_tile = tl.load(
        q + rows * q_token + head * q_head + d[None, :], mask=inside[:, None], other=0.0
    )
    rope_tile = q_tile
    if q_rope is not None:
        at = q_rope + rows * rope_token + head * rope_head + tl.arange(0, ROPE)[None, :]
        rope_tile = tl.load(at, mask=inside[:, None], other=0.0)
    out_at = out + (rows * NUM_Q + head) * VALUE + v[None, :]
    m = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    acc = tl.zeros([ROWS, VALUE], dtype=tl.float32)
    if sums is not None:
        m = tl.load(sums + (token + r) * NUM_Q + head, mask=inside, other=float("-inf"))
        resumed = m > float("-inf")
        total = tl.where(resumed, 1.0, 0.0)
        acc = tl.load(out_at, mask=(inside & resumed)[:, None], other=0.0).to(tl.float32)
    origin = 0
    query = r + num_keys
    unmasked = num_keys // TILE
    last = num_keys
    if not CACHED:
        origin = tl.load(tiles + tile * 4 + 2)
        start = tl.load(tiles + tile * 4 + 3)
        query = start + r
        unmasked = (start + 1) // TILE
        last = start + count
    kv_head = head // GROUP
    state = _scan(
        (m, total, acc), q_tile, rope_tile, query, keys, rope_keys, values, origin, kv_head * key_head,
        kv_head * value_head, 0, unmasked, last, scale, cap, TILE, False, CAPPED,
    )  # fmt: skip
    m, total, acc = _scan(
        state, q_tile, rope_tile, query, keys, rope_keys, values, origin, kv_head * key_head,
        kv_head * value_head, unmasked, tl.cdiv(last, TILE), last, scale, cap, TILE, True, CAPPED,
    )  # fmt: skip
    total = tl.where(inside, total, 1.0)
    if CACHED:
        tl.store(sums + (token + r) * NUM_Q + head, m + tl.log2(total), mask=inside)
        result = acc / total[:, None]
    else:
        result = _result((m, total, acc), sinks, head + r * 0, inside)
    tl.store(out_at, result.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["first", "num_tokens"])
def gather_kernel(
    pages, scales, table, out, first, num_tokens,
    NUM_KV: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, SIZE: tl.constexpr,
    STRIDE: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy TOKENS keys or values of one head from their pages, and dequantise codes."""
    pdl.begin(PDL)
    at, head = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1)
    d = tl.arange(0, DIM_PAD)
    inside = at < num_tokens
    position = first + at
    block = tl.load(table + position // SIZE, mask=inside, other=0).to(tl.int64)
    row = block * STRIDE + head * SIZE + position % SIZE
    mask = inside[:, None] & (d < DIM)[None, :]
    value = tl.load(pages + row[:, None] * DIM + d[None, :], mask=mask, other=0.0)
    if scales is not None:
        scale = tl.load(scales + row, mask=inside, other=0.0)
        value = value.to(tl.float32) * scale[:, None]
    target = out + (at.to(tl.int64) * NUM_KV + head)[:, None] * DIM + d[None, :]
    tl.store(target, value.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class Queries:
    """Queries [tokens, heads, dim], and a part [tokens, heads, rope dim] that meets other keys."""

    values: Tensor
    rotated: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys and values [tokens, kv heads, dim]; all heads share the keys of `Queries.rotated`."""

    keys: Tensor
    values: Tensor
    rotated: Tensor | None = None  # [tokens, rope dim]


def supports(dim: int, options: AttentionOptions) -> bool:
    """Whether chunks of such layers can be computed; others read pages."""
    return dim in _DIMS and options.window is None


def no_sums(queries: Tensor) -> Tensor:
    """The sums of weights of queries [tokens, heads, ...] that have met no key."""
    return queries.new_full(queries.shape[:2], float("-inf"), dtype=torch.float32)


def pieces(context: CachedContext, num_tokens: int) -> Iterator[tuple[int, int]]:
    """Cut cached tokens into ranges (first, count) of about `num_tokens`."""
    size = max(_MIN_PIECE, num_tokens)
    for first in range(0, context.num_tokens, size):
        yield first, min(size, context.num_tokens - first)


def gather(
    pages: Tensor,
    scales: Tensor | None,
    kv: LayerKV,
    batch: StepBatch,
    context: CachedContext,
    piece: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor:
    """The keys or values of cached tokens, [tokens, kv heads, dim]."""
    first, count = piece
    _, num_kv, size, dim = pages.shape
    out = torch.empty((count, num_kv, dim), dtype=dtype, device=pages.device)
    gather_kernel[(triton.cdiv(count, _GATHERED), num_kv)](
        pages,
        scales,
        batch.table_of(kv)[context.slot],
        out,
        first,
        count,
        NUM_KV=num_kv,
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        SIZE=size,
        STRIDE=kv.stride,
        TOKENS=_GATHERED,
        num_warps=4,
        **pdl.options(),
    )
    return out


def tiling(dim: int, rope: int, capped: bool) -> dict[str, int]:
    """Tiling and launch options, measured on an H200."""
    if dim == 128 and not rope and not capped:
        return {"ROWS": _ROWS, "TILE": 128, "num_warps": 8, "num_stages": 3}
    return {"ROWS": _ROWS, "TILE": 64, "num_warps": 8, "num_stages": 3}


def attend(
    queries: Queries,
    keys: Keys,
    out: Tensor,
    tiles: Tensor,
    options: AttentionOptions,
    *,
    sums: Tensor | None,
    cached: bool = False,
) -> None:
    """Attend from the tokens of `tiles` to `keys`, and write `out` [tokens, heads, dim].

    `cached`: the keys are of tokens before the chunk, and `sums` is updated; else they are the step's
    own, and the last that these tokens meet.
    """
    q, rotated = queries.values, queries.rotated
    num_q, dim, value_dim = q.shape[1], q.shape[2], keys.values.shape[2]
    rope = 0 if rotated is None else rotated.shape[2]
    if hopper_attention.refuse(q, value_dim, rope, options) is None:
        with_rope, keys_with_rope = (q, rotated), (keys.keys, keys.rotated)
        hopper_attention.attend(
            with_rope, keys_with_rope, keys.values, out, tiles, options, sums=sums, cached=cached
        )
        return
    capped = options.soft_cap is not None
    launch = tiling(dim, rope, capped)
    tile = launch["TILE"]
    fit(chunk_attention_kernel)[(tiles.shape[0], num_q)](
        q,
        rotated,
        _descriptor(keys.keys, tile),
        None if keys.rotated is None else _descriptor(keys.rotated[:, None], tile),
        _descriptor(keys.values, tile),
        options.sinks,
        out,
        sums,
        tiles,
        keys.keys.shape[0] if cached else 0,
        options.scale * _LOG2_E,
        (options.soft_cap or 1.0) * _LOG2_E,
        *q.stride()[:2],
        *((0, 0) if rotated is None else rotated.stride()[:2]),
        keys.keys.stride(1),
        keys.values.stride(1),
        NUM_Q=num_q,
        GROUP=num_q // keys.keys.shape[1],
        DIM=dim,
        ROPE=rope,
        VALUE=value_dim,
        CACHED=cached,
        CAPPED=capped,
        **launch,
        **pdl.options(),
    )


def _descriptor(values: Tensor, rows: int) -> TensorDescriptor:
    """Of tiles of `rows` tokens and one head."""
    return TensorDescriptor(values, *hopper_attention.matrix_of(values), [rows, values.shape[2]])
