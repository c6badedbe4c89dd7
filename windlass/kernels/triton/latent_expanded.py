"""MLA of long prompt chunks on CUDA, with keys and values that are computed for every head.

Absorbed weights make attention read the cached latents themselves, at 3.4 times the arithmetic per
query and key (DeepSeek's sizes). That suits decodes, which wait for memory. The tokens of a long chunk
share the cost of keys and values.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from windlass.core.mla import LatentHeads
from windlass.kernels.attention_options import AttentionOptions
from windlass.kernels.batch import LayerKV, StepBatch
from windlass.kernels.latent import LatentWeights
from windlass.kernels.triton.chunk_attention import (
    Keys,
    Queries,
    attend,
    gather,
    no_sums,
    pieces,
)
from windlass.kernels.triton.latent import (
    absorb_keys,
    latent_attention,
    latent_outputs,
    latent_queries,
    write_latents,
)

_MIN_DIM = 16  # the least size of each axis of a product


def _is_supported(heads: LatentHeads) -> bool:
    """Whether the sizes are those that tiles can have; every DeepSeek model has such."""
    dims = (heads.nope_dim, heads.rope_dim, heads.value_dim)
    return all(dim >= _MIN_DIM and dim & (dim - 1) == 0 for dim in dims)


def attend_latent(
    projected: Tensor,
    q: Tensor,
    heads: LatentHeads,
    weights: LatentWeights,
    cos_sin: Tensor,
    kv: LayerKV,
    batch: StepBatch,
    scale: float,
) -> Tensor:
    """Same contract as `Ops.attend_latent`, for a step with `LongChunks`."""
    work = batch.work
    assert work is not None
    assert work.long is not None
    if not _is_supported(heads):
        absorbing = replace(batch, work=replace(work, long=None))
        absorbed = latent_queries(projected, q, heads, weights, cos_sin, kv, absorbing)
        mixed = latent_attention(absorbed, kv, absorbing, scale, heads.rank)
        return latent_outputs(mixed, weights, absorbing)
    tokens = q.shape[0]
    absorbed = q.new_empty((tokens, heads.num_q, heads.dim))
    fresh = q.new_empty((tokens, heads.dim))
    rotated = absorbed[..., heads.rank :]
    write_latents(projected, q, rotated, heads, weights, cos_sin, kv, batch, fresh)
    if work.singles.shape[0] or work.long.others.shape[0]:
        absorb_keys(absorbed, q, heads, weights, batch)
        mixed = latent_attention(absorbed, kv, batch, scale, heads.rank)
        out = latent_outputs(mixed, weights, batch)
    else:
        out = q.new_empty((tokens, heads.num_q * heads.value_dim))
    shape, strides = (tokens, heads.num_q, heads.nope_dim), (q.stride(0), heads.query_dim, 1)
    queries = Queries(q.as_strided(shape, strides), rotated)
    up = weights.joint
    if up is None:
        up = torch.cat([weights.keys, weights.values], dim=1)
    by_head = out.unflatten(1, (heads.num_q, heads.value_dim))
    options = AttentionOptions(scale)

    def expanded(latents: Tensor) -> Keys:
        low, high = latents.split([heads.rank, heads.rope_dim], dim=1)
        both = (low @ up.flatten(0, 1).T).unflatten(1, up.shape[:2])
        keys, values = both.split([heads.nope_dim, heads.value_dim], dim=2)
        return Keys(keys, values, high)

    sums = no_sums(queries.values) if work.long.contexts else None
    for context in work.long.contexts:
        for piece in pieces(context, tokens):
            latents = gather(kv.keys, kv.key_scales, kv, batch, context, piece, q.dtype)
            keys = expanded(latents.squeeze(1))
            attend(queries, keys, by_head, context.tiles, options, sums=sums, cached=True)
    attend(queries, expanded(fresh), by_head, work.long.tiles, options, sums=sums)
    return out
