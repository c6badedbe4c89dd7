"""Attention over latent vectors (MLA): its types, and the reference implementation.

All heads of a layer share one latent vector per token. The up-projection of keys is absorbed into the
queries, and that of values into the outputs, so attention reads the latent pages themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from windlass.core.mla import LatentHeads
from windlass.kernels import batch_invariant_attention, reference, torch_attention
from windlass.kernels.attention_options import AttentionOptions
from windlass.kernels.batch import LayerKV, StepBatch

_INVARIANT_ROWS = 16  # of a batch-invariant GEMM


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Weights of an MLA layer that its attention reads."""

    norm: Tensor  # [rank]
    eps: float
    keys: Tensor  # [heads, nope dim, rank]: a head's projection of latents to keys
    values: Tensor  # [heads, value dim, rank]
    joint: Tensor | None = None  # [heads, nope dim + value dim, rank], of which both are views


def latent_queries(
    projected: Tensor,
    q: Tensor,
    heads: LatentHeads,
    weights: LatentWeights,
    cos_sin: Tensor,
    kv: LayerKV,
    batch: StepBatch,
) -> Tensor:
    """Write the tokens' latent vectors to their pages, and return the queries that attend to them.

    The first columns of q are the heads' queries, the last of `projected` the latent: `rank` numbers,
    which are normalised, and a key, which is rotated. Both may be one tensor. A query times a latent
    vector is the head's q times its key. Returns [tokens, heads, rank + rope dim].
    """
    cos, sin = cos_sin[batch.positions].chunk(2, dim=-1)

    def rotated(x: Tensor) -> Tensor:
        if heads.interleaved:  # as halves: queries and keys may share any order of features
            x = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
        return reference.rope(x, cos, sin)

    low, key = projected[:, -heads.dim :].split([heads.rank, heads.rope_dim], dim=-1)
    low = reference.rms_norm(low, weights.norm, weights.eps)
    _write(torch.cat([low[:, None], rotated(key[:, None])], dim=-1), kv, batch)
    q = q[:, : heads.num_q * heads.query_dim].unflatten(1, (heads.num_q, heads.query_dim))
    nope, positional = q.split([heads.nope_dim, heads.rope_dim], dim=-1)
    absorbed = _per_head(nope, weights.keys, batch.batch_invariant)
    return torch.cat([absorbed, rotated(positional)], dim=-1)


def latent_attention(
    queries: Tensor, kv: LayerKV, batch: StepBatch, scale: float, rank: int
) -> Tensor:
    """Attention over latent pages, of queries [tokens, heads, dim].

    The first `rank` numbers of the result [tokens, heads, ...] are the mean latents.
    """
    kernel = batch_invariant_attention if batch.batch_invariant else reference
    return kernel.attention(queries, _with_values(kv, rank), batch, AttentionOptions(scale))


def torch_latent_attention(
    queries: Tensor, kv: LayerKV, batch: StepBatch, scale: float, rank: int
) -> Tensor:
    """Same contract as `latent_attention`, with torch's fused attention."""
    kernel = batch_invariant_attention if batch.batch_invariant else torch_attention
    return kernel.attention(queries, _with_values(kv, rank), batch, AttentionOptions(scale))


def latent_outputs(mixed: Tensor, weights: LatentWeights, batch: StepBatch) -> Tensor:
    """Project mean latents [tokens, heads, ...] to the heads' values [tokens, heads * value dim]."""
    rank = weights.values.shape[2]
    return _per_head(mixed[..., :rank], weights.values.mT, batch.batch_invariant).flatten(1)


def _with_values(kv: LayerKV, rank: int) -> LayerKV:
    """Latent pages whose values are the first `rank` numbers of their keys."""
    return replace(kv, values=kv.values[..., :rank])


def _write(new: Tensor, kv: LayerKV, batch: StepBatch) -> None:
    """Write each token's latent vector [tokens, 1, dim] to its page."""
    blocks = batch.table_of(kv)[batch.token_slots, batch.positions // kv.block_size].long()
    offsets = batch.positions % kv.block_size
    if kv.key_scales is not None:
        new, kv.key_scales[blocks, :, offsets] = reference.encode(new, kv.keys.dtype)
    kv.keys[blocks, :, offsets] = new.to(kv.keys.dtype)


def _per_head(x: Tensor, weight: Tensor, batch_invariant: bool) -> Tensor:
    """x[:, h] @ weight[h] for each head h: [tokens, heads, in] to [tokens, heads, out]."""
    x = x.transpose(0, 1)
    if not batch_invariant:
        return torch.bmm(x, weight).transpose(0, 1)
    # Chunks of one shape, so that each row is summed in the same order.
    count = x.shape[1]
    padded = pad(x, (0, 0, 0, -count % _INVARIANT_ROWS))
    chunks = [torch.bmm(chunk, weight) for chunk in padded.split(_INVARIANT_ROWS, dim=1)]
    return torch.cat(chunks, dim=1)[:, :count].transpose(0, 1)
