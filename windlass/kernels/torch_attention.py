"""Paged attention with torch's scaled_dot_product_attention; single-query rows are batched.

The query heads of a kv head are folded into the query length, so keys are never repeated. Soft caps
and sinks are left to the reference implementation.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from windlass.kernels.attention_options import AttentionOptions
from windlass.kernels.batch import LayerKV, Span, StepBatch
from windlass.kernels.reference import first_visible, read_row, read_rows, visible


def attention(queries: Tensor, kv: LayerKV, batch: StepBatch, options: AttentionOptions) -> Tensor:
    """Same contract as `reference.attention`; without soft cap and sinks."""
    assert options.soft_cap is None
    assert options.sinks is None
    out = queries.new_empty((*queries.shape[:2], kv.values.shape[-1]))
    single = [i for i, span in enumerate(batch.spans) if span.count == 1]
    if single:
        _attend_singles(out, queries, kv, batch, single, options)
    for span in batch.spans:
        if span.count > 1:
            table = batch.table_of(kv)[batch.token_slots[span.first]]
            _attend_chunk(out, queries, kv, table, span, options)
    return out


def _attend_singles(
    out: Tensor,
    queries: Tensor,
    kv: LayerKV,
    batch: StepBatch,
    rows: list[int],
    options: AttentionOptions,
) -> None:
    """Compute all single-query rows in one call, padded to the longest context."""
    _, kv_heads, size, dim = kv.keys.shape
    contexts = torch.tensor([batch.spans[i].context for i in rows], device=queries.device)
    tokens = torch.tensor([batch.spans[i].first for i in rows], device=queries.device)
    tables = batch.table_of(kv)[batch.token_slots[tokens]]
    visible_from = torch.zeros_like(contexts)
    if options.window is not None:
        visible_from = first_visible(contexts - 1, options).clamp_min(0)
    first = visible_from // size
    last = (contexts - 1) // size
    width = int((last - first).max()) + 1
    blocks = first[:, None] + torch.arange(width, device=queries.device)
    # Padding repeats the row's last block: entries behind a window or past the end are not read.
    keys, values = read_rows(kv, tables.gather(1, blocks.minimum(last[:, None])))
    key = first[:, None] * size + torch.arange(width * size, device=queries.device)
    mask = (key < contexts[:, None]) & (key >= visible_from[:, None])
    folded = queries[tokens].view(len(rows), kv_heads, -1, dim)
    mixed = scaled_dot_product_attention(
        folded,
        keys.to(folded.dtype),
        values.to(folded.dtype),
        mask[:, None, None, :],
        scale=options.scale,
    )
    out[tokens] = mixed.reshape(len(rows), -1, out.shape[-1])


def _attend_chunk(
    out: Tensor,
    queries: Tensor,
    kv: LayerKV,
    table: Tensor,
    span: Span,
    options: AttentionOptions,
) -> None:
    """Compute one row of several queries, with or without a cached prefix."""
    q = queries[span.first : span.first + span.count]  # [count, heads, dim]
    first = options.first_visible(span.start)
    keys, values = (part.to(q.dtype) for part in read_row(kv, table, span.context, first))
    group = q.shape[1] // keys.shape[0]
    # [count, kv_heads, group, dim] -> [kv_heads, group * count, dim]
    folded = q.unflatten(1, (keys.shape[0], group)).permute(1, 2, 0, 3).flatten(1, 2)
    mask = visible(span.start, span.count, options, q.device).repeat(group, 1)
    mixed = scaled_dot_product_attention(
        folded[None], keys[None], values[None], mask[None, None], scale=options.scale
    )[0]
    mixed = mixed.unflatten(1, (group, span.count)).permute(2, 0, 1, 3).flatten(1, 2)
    out[span.first : span.first + span.count] = mixed
