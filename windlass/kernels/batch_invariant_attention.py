"""Batch-invariant attention for any device: a query's result does not depend on other rows.

Queries are computed in tiles that start at fixed positions of their request. A tile is padded if a
step has only some of its queries. Shapes, and therefore summation orders, are the same for any batch
and any chunking of a prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from windlass.kernels.attention_options import AttentionOptions
from windlass.kernels.batch import LayerKV, StepBatch
from windlass.kernels.reference import attention_weights, read_row, visible

_TILE = 16


def attention(queries: Tensor, kv: LayerKV, batch: StepBatch, options: AttentionOptions) -> Tensor:
    """Same contract as `reference.attention`."""
    out = queries.new_empty((*queries.shape[:2], kv.values.shape[-1]))
    for span in batch.spans:
        table = batch.table_of(kv)[batch.token_slots[span.first]]
        for tile in range(span.start // _TILE * _TILE, span.context, _TILE):
            begin, end = max(tile, span.start), min(tile + _TILE, span.context)
            rows = slice(span.first + begin - span.start, span.first + end - span.start)
            q = queries.new_zeros((_TILE, *queries.shape[1:]))
            q[begin - tile : end - tile] = queries[rows]
            first = options.first_visible(begin)
            # Queries of the tile that are not in this step would read freed or unwritten positions.
            padding = (0, 0, first - options.first_visible(tile), tile + _TILE - end)
            keys, values = (pad(part, padding) for part in read_row(kv, table, end, first))
            mixed = _attend(q, keys, values, tile, options)
            out[rows] = mixed[begin - tile : end - tile]
    return out


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, tile: int, options: AttentionOptions
) -> Tensor:
    keys, values = keys.to(q.dtype), values.to(q.dtype)
    group = q.shape[1] // keys.shape[0]
    keys = keys.repeat_interleave(group, dim=0)
    values = values.repeat_interleave(group, dim=0)
    scores = torch.einsum("qhd,hkd->hqk", q, keys).float() * options.scale
    mask = visible(tile, _TILE, options, q.device)
    weights = attention_weights(scores, mask, options).to(q.dtype)
    return torch.einsum("hqk,hkd->qhd", weights, values)
