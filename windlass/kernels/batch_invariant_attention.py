"""Batch-invariant attention for any device: a query's result does not depend on other rows.

Queries are computed in tiles that start at fixed positions of their request. A tile is padded if a
step has only some of its queries. Shapes, and therefore summation orders, are the same for any batch
and any chunking of a prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.kernels.batch import LayerKV, Span, StepBatch
from windlass.kernels.reference import read_row

_TILE = 16


def attention(
    queries: Tensor,
    kv: LayerKV,
    batch: StepBatch,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Same contract as `reference.attention`."""
    out = torch.empty_like(queries)
    for span in batch.spans:
        table = batch.tables[batch.token_slots[span.first]]
        for tile in range(span.start // _TILE * _TILE, span.context, _TILE):
            begin, end = max(tile, span.start), min(tile + _TILE, span.context)
            rows = slice(span.first + begin - span.start, span.first + end - span.start)
            q = queries.new_zeros((_TILE, *queries.shape[1:]))
            q[begin - tile : end - tile] = queries[rows]
            mixed = _attend(q, kv, table, Span(0, _TILE, tile), scale, window, soft_cap)
            out[rows] = mixed[begin - tile : end - tile]
    return out


def _attend(
    q: Tensor,
    kv: LayerKV,
    table: Tensor,
    tile: Span,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Tensor:
    keys, values = (part.to(q.dtype) for part in read_row(kv, table, tile.context))
    group = q.shape[1] // keys.shape[0]
    keys = keys.repeat_interleave(group, dim=0)
    values = values.repeat_interleave(group, dim=0)
    scores = torch.einsum("qhd,hkd->hqk", q, keys).float() * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    query = torch.arange(tile.start, tile.context, device=q.device)[:, None]
    key = torch.arange(keys.shape[1], device=q.device)[None, :]
    mask = key <= query
    if window is not None:
        mask &= key > query - window
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1).to(q.dtype)
    return torch.einsum("hqk,hkd->qhd", weights, values)
