"""Paged attention on CUDA: assigns rows to kernels, and chooses their tiling and launch options."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from windlass.kernels.attention_options import AttentionOptions, RopeOptions
from windlass.kernels.batch import AttentionWork, Heads, LayerKV, LongChunks, StepBatch
from windlass.kernels.gemm_io import Outputs
from windlass.kernels.triton import chunk_attention, pdl
from windlass.kernels.triton.attention_kernels import paged_decode_kernel, paged_prefill_kernel
from windlass.kernels.triton.chunk_attention import (
    LONG_PIECE,
    Keys,
    Queries,
    gather,
    no_sums,
    pieces,
)
from windlass.kernels.triton.chunk_attention import attend as attend_to
from windlass.kernels.triton.fit import fit
from windlass.kernels.triton.norm import values_and_scales
from windlass.kernels.triton.rope import rope_write

_LOG2_E = 1.4426950408889634
# Max programs (rows times kv heads) for RoPE and attention in one kernel. Fusing saves a launch, but
# each program has more work before it reads keys.
_MAX_FUSED_PROGRAMS = 1024
# Max tokens of a row for the fused kernel: the program of the last one writes the keys of all.
_MAX_FUSED_WIDTH = 16
TILE_ROWS = 128  # query rows (tokens x heads of a group) per tile


def tile_tokens(group: int) -> int:
    """Tokens of a chunk per tile."""
    return TILE_ROWS // triton.next_power_of_2(group)


def fuses(tokens: int, num_kv: int, width: int) -> bool:
    """Whether the decode kernel applies RoPE, for rows of `width` adjacent single tokens."""
    return tokens * num_kv <= _MAX_FUSED_PROGRAMS and width <= _MAX_FUSED_WIDTH


def attention(
    queries: Tensor,
    kv: LayerKV,
    batch: StepBatch,
    options: AttentionOptions,
    fresh: Tensor | None = None,
) -> Tensor:
    """Same contract as `reference.attention`.

    `fresh` has the step's own keys and values, contiguous and before quantisation.
    """
    assert batch.work is not None
    out, tiles = torch.empty_like(queries), batch.work.tiles
    if batch.work.singles.shape[0]:
        _decode(out, queries, None, kv, batch, options)
    if fresh is not None:
        chunks = _long_chunks(batch.work, fresh.shape[3], options)
        if chunks is not None:
            _attend_chunks(out, queries, kv, fresh, batch, options, chunks)
            tiles = chunks.others
    if tiles.shape[0]:
        own = fresh if kv.key_scales is not None else None  # else pages hold the same numbers
        _prefill(out, queries, kv, own, batch, options, tiles)
    return out


def _long_chunks(work: AttentionWork, dim: int, options: AttentionOptions) -> LongChunks | None:
    """The chunks of a layer that attend to contiguous keys and values."""
    return work.long if chunk_attention.supports(dim, options) else None


def _attend_chunks(
    out: Tensor,
    queries: Tensor,
    kv: LayerKV,
    fresh: Tensor,
    batch: StepBatch,
    options: AttentionOptions,
    chunks: LongChunks,
) -> None:
    """Attend from long chunks to the cached tokens before them, and to their own keys in `fresh`."""
    q, dtype = Queries(queries), queries.dtype
    sums = no_sums(queries) if chunks.contexts else None
    for context in chunks.contexts:
        for piece in pieces(context, LONG_PIECE * queries.shape[0]):
            keys = gather(kv.keys, kv.key_scales, kv, batch, context, piece, dtype)
            values = gather(kv.values, kv.value_scales, kv, batch, context, piece, dtype)
            attend_to(q, Keys(keys, values), out, context.tiles, options, sums=sums, cached=True)
    attend_to(q, Keys(fresh[0], fresh[1]), out, chunks.tiles, options, sums=sums)


def attend(
    qkv: Outputs,
    heads: Heads,
    rope: RopeOptions,
    kv: LayerKV,
    batch: StepBatch,
    options: AttentionOptions,
) -> Tensor:
    """`rope_write` and `attention`, fused if the step has only a few single-token rows."""
    work = batch.work
    assert work is not None
    values, rows, columns = values_and_scales(qkv)
    quantised = kv.key_scales is not None
    tokens = values.shape[0]
    few = batch.all_singles and fuses(tokens, heads.num_kv, work.width)
    fused = few and not work.long_contexts  # the fused kernel needs more registers
    assert fused or not work.siblings
    if fused:
        out = values.new_empty((tokens, heads.num_q, heads.dim))
        _decode(out, values, _Raw(rows=rows, columns=columns, rope=rope), kv, batch, options)
        return out
    fresh = None
    contiguous = _long_chunks(work, heads.dim, options) is not None
    if contiguous or (quantised and work.tiles.shape[0] and not batch.batch_invariant):
        # Batch-invariant steps read every key from its page, as later steps do.
        fresh = values.new_empty((2, tokens, heads.num_kv, heads.dim))
    queries = rope_write(qkv, heads, rope, kv, batch, fresh)
    return attention(queries, kv, batch, options, fresh)


@dataclass(frozen=True, slots=True)
class _Raw:
    """Inputs of the fused kernel that reads the QKV GEMM's outputs."""

    rows: Tensor | None  # scales of `UnscaledOutputs`
    columns: Tensor | None
    rope: RopeOptions


def _in_log2(options: AttentionOptions) -> tuple[float, float]:
    """Scale and soft cap of scores whose exponentials are powers of two."""
    return options.scale * _LOG2_E, (options.soft_cap or 1.0) * _LOG2_E


def _decode_options(
    dim_pad: int, splits: int, quantised: bool = False, long_contexts: bool = False
) -> dict[str, int]:
    """Tiling and launch options of the decode kernel; splits stay long if rows fill the device.

    Dequantisation needs registers and loads scales. If rows or long contexts fill the device,
    programs of two warps overlap better; otherwise longer tiles reduce their number.
    """
    if dim_pad > 256:
        return {"TILE": 32, "MIN_TILES": 4, "num_warps": 4, "num_stages": 2}
    if dim_pad > 128:
        return {"TILE": 32, "MIN_TILES": 4, "num_warps": 4, "num_stages": 3}
    if long_contexts:
        tile, stages = (64, 3) if quantised else (32, 4)
        return {"TILE": tile, "MIN_TILES": 256 // tile, "num_warps": 2, "num_stages": stages}
    min_split = 512 if splits <= 2 else 128
    tile, warps = 64, 4
    if quantised:
        tile, warps = (64, 2) if splits <= 8 else (128, 4)
    return {"TILE": tile, "MIN_TILES": min_split // tile, "num_warps": warps, "num_stages": 3}


def _new_rows(width: int) -> int:
    """Rows of the tile of new keys in the fused kernel; few sizes, since each is another kernel."""
    return width if width == 1 else 8 if width <= 8 else _MAX_FUSED_WIDTH


def _decode(
    out: Tensor,
    queries: Tensor,
    raw: _Raw | None,
    kv: LayerKV,
    batch: StepBatch,
    options: AttentionOptions,
) -> None:
    work = batch.work
    assert work is not None
    _, num_kv, size, dim = kv.keys.shape
    num_q, count, splits = out.shape[1], work.singles.shape[0], work.splits
    rope = raw.rope if raw is not None else RopeOptions(None)
    norms = rope.norms
    split_out = split_max = split_sum = out
    if splits > 1:
        shape = (count, num_q, splits)
        split_out = queries.new_empty((*shape, dim), dtype=torch.float32)
        split_max, split_sum = queries.new_empty((2, *shape), dtype=torch.float32)
    dim_pad = triton.next_power_of_2(dim)
    fit(paged_decode_kernel)[(count, num_kv, splits)](
        queries,
        *((raw.rows, raw.columns) if raw is not None else (None, None)),
        rope.cos_sin,
        *((norms.q, norms.k) if norms is not None else (None, None)),
        options.sinks,
        norms.eps if norms is not None else 0.0,
        kv.keys,
        kv.values,
        kv.key_scales,
        kv.value_scales,
        out,
        split_out,
        split_max,
        split_sum,
        work.counters,
        work.singles,
        batch.positions,
        batch.token_slots,
        batch.table_of(kv),
        batch.tables.stride(1),
        *_in_log2(options),
        options.window or 0,
        work.width,
        work.spare,
        NUM_Q=num_q,
        NUM_KV=num_kv,
        GROUP=num_q // num_kv,
        DIM=dim,
        DIM_PAD=dim_pad,
        SIZE=size,
        STRIDE=kv.stride,
        SPLITS=splits,
        NEW=_new_rows(work.width) if raw is not None else 1,
        SIBLINGS=work.siblings if raw is not None else 0,
        ALL_SINGLES=count == queries.shape[0],
        RAW=raw is not None,
        ROTATED=rope.rotated,
        INTERLEAVED=rope.interleaved,
        NORM=norms.kind if norms is not None else None,
        PER_HEAD=norms is not None and norms.per_head,
        WINDOWED=options.window is not None,
        CHUNKED=options.chunked,
        CAPPED=options.soft_cap is not None,
        **_decode_options(dim_pad, splits, kv.key_scales is not None, work.long_contexts),
        **pdl.options(),
    )


def _prefill_options(dim_pad: int, quantised: bool = False) -> dict[str, int]:
    """Tiling and launch options of the prefill kernel; dequantisation needs registers."""
    stages = 2 if quantised or dim_pad > 256 else 3
    # Accumulators of more rows would not fit in the registers.
    rows = TILE_ROWS if dim_pad <= 256 else 32
    tile = 64 if dim_pad <= 128 else 32
    return {"ROWS": rows, "TILE": tile, "num_warps": 8, "num_stages": stages}


def _prefill(
    out: Tensor,
    queries: Tensor,
    kv: LayerKV,
    fresh: Tensor | None,
    batch: StepBatch,
    options: AttentionOptions,
    tiles: Tensor,
) -> None:
    _, num_kv, size, dim = kv.keys.shape
    num_q = queries.shape[1]
    group = num_q // num_kv
    dim_pad = triton.next_power_of_2(dim)
    chosen = _prefill_options(dim_pad, kv.key_scales is not None and fresh is None)
    fit(paged_prefill_kernel)[(tiles.shape[0], num_kv, TILE_ROWS // chosen["ROWS"])](
        queries,
        kv.keys,
        kv.values,
        kv.key_scales,
        kv.value_scales,
        *((None, None) if fresh is None else (fresh[0], fresh[1])),
        options.sinks,
        out,
        tiles,
        batch.table_of(kv),
        batch.tables.stride(1),
        *_in_log2(options),
        options.window or 0,
        NUM_Q=num_q,
        NUM_KV=num_kv,
        GROUP=group,
        GROUP_PAD=triton.next_power_of_2(group),
        DIM=dim,
        DIM_PAD=dim_pad,
        SIZE=size,
        STRIDE=kv.stride,
        WINDOWED=options.window is not None,
        CHUNKED=options.chunked,
        CAPPED=options.soft_cap is not None,
        BATCH_INVARIANT=batch.batch_invariant,
        **chosen,
        **pdl.options(),
    )
