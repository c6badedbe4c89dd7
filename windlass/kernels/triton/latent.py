"""MLA on CUDA: attention over latent pages, and the GEMMs per head before and after it."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from windlass.core.mla import LatentHeads
from windlass.kernels.batch import LayerKV, StepBatch
from windlass.kernels.gpu import gpu_of
from windlass.kernels.latent import LatentWeights
from windlass.kernels.triton import pdl
from windlass.kernels.triton.attention import TILE_ROWS
from windlass.kernels.triton.fit import fit
from windlass.kernels.triton.latent_kernels import (
    latent_decode_kernel,
    latent_prefill_kernel,
    latent_write_kernel,
    per_head_kernel,
)

_LOG2_E = 1.4426950408889634
_MIN_DOT = 16  # the least size of each axis of a product
# Query rows per program: their accumulators fill the registers. Dequantisation needs some of them.
_DECODE_HEADS = 32
# Rows of a tile; fewer if keys are quantised or shared memory is small.
_PREFILL_ROWS, _FEW_PREFILL_ROWS = 64, 32
_PREFILL_BYTES = 128 * 1024  # shared memory for tiles of many rows
_FEW_TOKENS = 16
_MIN_SPLIT = 128  # tokens


def _padded(size: int) -> int:
    return max(_MIN_DOT, triton.next_power_of_2(size))


def decode_heads(num_q: int) -> int:
    """Heads of a token per program of the decode kernel."""
    return min(_DECODE_HEADS, _padded(num_q))


def decode_parts(num_q: int) -> int:
    """Programs per token and split of the decode kernel."""
    return triton.cdiv(num_q, decode_heads(num_q))


def latent_queries(
    projected: Tensor,
    q: Tensor,
    heads: LatentHeads,
    weights: LatentWeights,
    cos_sin: Tensor,
    kv: LayerKV,
    batch: StepBatch,
) -> Tensor:
    """Same contract as `windlass.kernels.latent.latent_queries`."""
    queries = q.new_empty((q.shape[0], heads.num_q, heads.dim))
    rotated = queries[..., heads.rank :]
    write_latents(projected, q, rotated, heads, weights, cos_sin, kv, batch)
    absorb_keys(queries, q, heads, weights, batch)
    return queries


def absorb_keys(
    queries: Tensor, q: Tensor, heads: LatentHeads, weights: LatentWeights, batch: StepBatch
) -> None:
    """Write the part of `queries` that meets latents."""
    shape, strides = (q.shape[0], heads.num_q, heads.nope_dim), (q.stride(0), heads.query_dim, 1)
    nope = q.as_strided(shape, strides)
    _per_head(nope, weights.keys, queries[..., : heads.rank], batch.batch_invariant)


def write_latents(
    projected: Tensor,
    q: Tensor,
    rotated: Tensor,
    heads: LatentHeads,
    weights: LatentWeights,
    cos_sin: Tensor,
    kv: LayerKV,
    batch: StepBatch,
    fresh: Tensor | None = None,
) -> None:
    """Write the latents to their pages and to `fresh`, and the rotated part of q to `rotated`."""
    half, latent = heads.rope_dim // 2, projected[:, -heads.dim :]
    latent_write_kernel[(q.shape[0],)](
        q,
        latent,
        weights.norm,
        cos_sin,
        kv.keys,
        kv.key_scales,
        fresh,
        rotated,
        batch.positions,
        batch.token_slots,
        batch.table_of(kv),
        q.stride(0),
        latent.stride(0),
        *rotated.stride()[:2],
        batch.tables.stride(1),
        weights.eps,
        NUM_Q=heads.num_q,
        NUM_Q_PAD=triton.next_power_of_2(heads.num_q),
        NOPE=heads.nope_dim,
        RANK=heads.rank,
        RANK_PAD=triton.next_power_of_2(heads.rank),
        HALF=half,
        HALF_PAD=triton.next_power_of_2(half),
        SIZE=kv.block_size,
        INTERLEAVED=heads.interleaved,
        num_warps=4,
        **pdl.options(),
    )


def latent_outputs(mixed: Tensor, weights: LatentWeights, batch: StepBatch) -> Tensor:
    """Same contract as `windlass.kernels.latent.latent_outputs`."""
    out = mixed.new_empty((*mixed.shape[:2], weights.values.shape[1]))
    _per_head(mixed, weights.values.mT, out, batch.batch_invariant)
    return out.flatten(1)


def _per_head_options(few_tokens: bool, num_heads: int, num_out: int) -> dict[str, int]:
    """Tiling of the GEMMs per head: programs of few outputs fill the device."""
    rows = _FEW_TOKENS if few_tokens else 64
    outputs = 64 if num_heads * num_out >= 64 * 128 else 32
    return {"ROWS": rows, "OUTPUTS": outputs, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3}


def _per_head(x: Tensor, weight: Tensor, out: Tensor, batch_invariant: bool) -> None:
    """out[:, h] = x[:, h] @ weight[h]; rows of x and out are contiguous within a head."""
    tokens, num_heads, num_in = x.shape
    num_out = out.shape[2]
    few = tokens <= _FEW_TOKENS and not batch_invariant
    options = _per_head_options(few, num_heads, num_out)
    grid = (
        triton.cdiv(tokens, options["ROWS"]),
        num_heads,
        triton.cdiv(num_out, options["OUTPUTS"]),
    )
    fit(per_head_kernel)[grid](
        x,
        weight,
        out,
        tokens,
        *x.stride()[:2],
        *weight.stride(),
        *out.stride()[:2],
        K=num_in,
        N=num_out,
        **options,
        **pdl.options(),
    )


def latent_attention(
    queries: Tensor, kv: LayerKV, batch: StepBatch, scale: float, rank: int
) -> Tensor:
    """Same contract as `windlass.kernels.latent.latent_attention`; rows of `LongChunks` are zeros."""
    assert batch.work is not None
    shape = (*queries.shape[:2], rank)
    out = queries.new_empty(shape) if batch.work.long is None else queries.new_zeros(shape)
    if batch.work.singles.shape[0]:
        _decode(out, queries, kv, batch, scale * _LOG2_E)
    tiles = batch.work.tiles if batch.work.long is None else batch.work.long.others
    if tiles.shape[0]:
        _prefill(out, queries, kv, batch, tiles, scale * _LOG2_E)
    return out


def _decode_options(heads: int, quantised: bool) -> dict[str, int]:
    """Tiling and launch options of the decode kernel."""
    warps = 4 if heads <= _MIN_DOT and not quantised else 8
    return {"TILE": 32, "MIN_TILES": _MIN_SPLIT // 32, "num_warps": warps, "num_stages": 3}


def _decode(out: Tensor, queries: Tensor, kv: LayerKV, batch: StepBatch, scale: float) -> None:
    work = batch.work
    assert work is not None
    assert not work.siblings
    _, num_q, dim = queries.shape
    count, splits, rank = work.singles.shape[0], work.splits, out.shape[2]
    heads = decode_heads(num_q)
    split_out = split_max = split_sum = out
    if splits > 1:
        shape = (count, num_q, splits)
        split_out = queries.new_empty((*shape, rank), dtype=torch.float32)
        split_max, split_sum = queries.new_empty((2, *shape), dtype=torch.float32)
    fit(latent_decode_kernel)[(count, decode_parts(num_q), splits)](
        queries,
        kv.keys,
        kv.key_scales,
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
        scale,
        NUM_Q=num_q,
        HEADS=heads,
        SIZE=kv.block_size,
        SPLITS=splits,
        **_dims(dim, rank),
        **_decode_options(heads, kv.key_scales is not None),
        **pdl.options(),
    )


def _dims(dim: int, rank: int) -> dict[str, int]:
    rope = dim - rank
    return {"RANK": rank, "RANK_PAD": _padded(rank), "ROPE": rope, "ROPE_PAD": _padded(rope)}


def _prefill_options(quantised: bool, shared_bytes: int) -> dict[str, int]:
    """Tiling and launch options of the prefill kernel; the queries of a tile lie in shared memory."""
    if quantised or shared_bytes < _PREFILL_BYTES:
        return {"ROWS": _FEW_PREFILL_ROWS, "TILE": 32, "num_warps": 8, "num_stages": 2}
    return {"ROWS": _PREFILL_ROWS, "TILE": 32, "num_warps": 8, "num_stages": 3}


@cache
def _shared_bytes(device: torch.device) -> int:
    return gpu_of(device).shared_bytes


def _prefill(
    out: Tensor, queries: Tensor, kv: LayerKV, batch: StepBatch, tiles: Tensor, scale: float
) -> None:
    _, num_q, dim = queries.shape
    options = _prefill_options(kv.key_scales is not None, _shared_bytes(queries.device))
    fit(latent_prefill_kernel)[(tiles.shape[0], TILE_ROWS // options["ROWS"])](
        queries,
        kv.keys,
        kv.key_scales,
        out,
        tiles,
        batch.table_of(kv),
        batch.tables.stride(1),
        scale,
        NUM_Q=num_q,
        NUM_Q_PAD=triton.next_power_of_2(num_q),
        SIZE=kv.block_size,
        **_dims(dim, out.shape[2]),
        **options,
        **pdl.options(),
    )
