"""Paged attention on CUDA: which kernel gets which rows, and how it is cut and compiled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from windlass.kernels.batch import Heads, LayerKV, StepBatch
from windlass.kernels.rounded import Outputs
from windlass.kernels.triton import pdl
from windlass.kernels.triton.attention_kernels import paged_decode_kernel, paged_prefill_kernel
from windlass.kernels.triton.norm import parts
from windlass.kernels.triton.rope import rope_write

_LOG2_E = 1.4426950408889634
# Rotation and attention in one kernel save a launch, but each program has more to do before it reads
# keys; from so many programs on (rows times kv heads) that weighs more, and with codes always.
_FEW_PROGRAMS = 1024
_MOST_WIDE = 16  # tokens of a row whose keys one of them writes, as many as it has rows of queries
_TILE_ROWS = 128  # query rows (tokens x heads of a group) that one program takes


def tile_tokens(group: int) -> int:
    """How many tokens of a chunk go into one tile."""
    return _TILE_ROWS // triton.next_power_of_2(group)


def fuses(tokens: int, num_kv: int, width: int, coded: bool) -> bool:
    """Whether tokens that are alone, or `width` of a row side by side, are rotated within attention."""
    return tokens * num_kv <= _FEW_PROGRAMS and width <= _MOST_WIDE and not coded


def attention(
    queries: Tensor,
    kv: LayerKV,
    batch: StepBatch,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    fresh: Tensor | None = None,
) -> Tensor:
    """Same contract as `reference.attention`.

    `fresh` are the step's own keys and values as they were before pages took them as codes.
    """
    assert batch.work is not None
    out = torch.empty_like(queries)
    in_log2 = (scale * _LOG2_E, (soft_cap or 1.0) * _LOG2_E)
    if batch.work.singles.shape[0]:
        _decode(out, queries, None, kv, batch, in_log2, window, soft_cap is not None)
    if batch.work.tiles.shape[0]:
        _prefill(out, queries, kv, fresh, batch, in_log2, window, soft_cap is not None)
    return out


def attend(
    qkv: Outputs,
    heads: Heads,
    cos_sin: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    kv: LayerKV,
    batch: StepBatch,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """`rope_write` and `attention`, in one pass where few rows are of one token each."""
    work = batch.work
    assert work is not None
    values, rows, columns = parts(qkv)
    coded = kv.key_scales is not None
    tokens = values.shape[0]
    fused = batch.all_singles and fuses(tokens, heads.num_kv, work.width, coded)
    assert fused or not work.siblings
    if fused:
        out = values.new_empty((tokens, heads.num_q, heads.dim))
        raw = _Raw(rows, columns, cos_sin, norms)
        _decode(out, values, raw, kv, batch, (scale * _LOG2_E, _LOG2_E), window, False)
        return out
    fresh = None
    if coded and work.tiles.shape[0] and not batch.batch_invariant:
        # In a fixed order a key is read as it will always be read, which is from its page.
        fresh = values.new_empty((2, tokens, heads.num_kv, heads.dim))
    queries = rope_write(qkv, heads, cos_sin, norms, kv, batch, fresh)
    return attention(queries, kv, batch, scale, window, fresh=fresh)


@dataclass(frozen=True, slots=True)
class _Raw:
    """What is left to do to queries, keys and values that come straight from their product."""

    rows: Tensor | None  # scales that the product came without
    columns: Tensor | None
    cos_sin: Tensor
    norms: tuple[Tensor, Tensor, float] | None


def _decode_options(dim_pad: int, splits: int, coded: bool = False) -> dict[str, int]:
    """How the decode kernel is cut and compiled: parts stay long where rows alone fill the device.

    Codes take registers to become numbers in, and a scale each: where rows fill the device, programs
    of two warps overlap better, and where they do not, longer tiles are fewer.
    """
    if dim_pad > 128:
        return {"TILE": 32, "MIN_TILES": 4, "num_warps": 4, "num_stages": 3}
    least = 512 if splits <= 2 else 128
    tile, warps = 64, 4
    if coded:
        tile, warps = (64, 2) if splits <= 8 else (128, 4)
    return {"TILE": tile, "MIN_TILES": least // tile, "num_warps": warps, "num_stages": 3}


def _decode(
    out: Tensor,
    queries: Tensor,
    raw: _Raw | None,
    kv: LayerKV,
    batch: StepBatch,
    in_log2: tuple[float, float],
    window: int | None,
    capped: bool,
) -> None:
    work = batch.work
    assert work is not None
    _, num_kv, size, dim = kv.keys.shape
    num_q, count, splits = out.shape[1], work.singles.shape[0], work.splits
    cos_sin = raw.cos_sin if raw is not None else out
    norms = raw.norms if raw is not None else None
    part_out = part_max = part_sum = out
    if splits > 1:
        shape = (count, num_q, splits)
        part_out = queries.new_empty((*shape, dim), dtype=torch.float32)
        part_max, part_sum = queries.new_empty((2, *shape), dtype=torch.float32)
    dim_pad = triton.next_power_of_2(dim)
    paged_decode_kernel[(count, num_kv, splits)](
        queries,
        *((raw.rows, raw.columns) if raw is not None else (None, None)),
        cos_sin,
        *(norms or (out, out, 0.0)),
        kv.keys,
        kv.values,
        kv.key_scales,
        kv.value_scales,
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
        work.width,
        work.spare,
        NUM_Q=num_q,
        NUM_KV=num_kv,
        GROUP=num_q // num_kv,
        DIM=dim,
        DIM_PAD=dim_pad,
        SIZE=size,
        SPLITS=splits,
        WIDE=raw is not None and work.width > 1,
        SIBLINGS=work.siblings if raw is not None else 0,
        ALL_SINGLES=count == queries.shape[0],
        RAW=raw is not None,
        NORM=norms is not None,
        WINDOWED=window is not None,
        CAPPED=capped,
        **_decode_options(dim_pad, splits, kv.key_scales is not None),
        **pdl.options(),
    )


def _prefill_options(dim_pad: int, coded: bool = False) -> dict[str, int]:
    """How the prefill kernel is cut and compiled; codes need registers to become numbers in."""
    stages = 2 if coded else 3
    return {"TILE": 64 if dim_pad <= 128 else 32, "num_warps": 8, "num_stages": stages}


def _prefill(
    out: Tensor,
    queries: Tensor,
    kv: LayerKV,
    fresh: Tensor | None,
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
        kv.key_scales,
        kv.value_scales,
        *((None, None) if fresh is None else (fresh[0], fresh[1])),
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
        BATCH_INVARIANT=batch.batch_invariant,
        **_prefill_options(dim_pad, kv.key_scales is not None and fresh is None),
        **pdl.options(),
    )
