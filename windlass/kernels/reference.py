"""Reference implementation of every operation: the definition, the fallback and the tests' oracle.

Supports every shape, dtype and device; clarity comes before speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from windlass.kernels.attention_options import AttentionOptions, QKNorms, RopeOptions
from windlass.kernels.batch import MAX_CODE, Heads, LayerKV, StepBatch

# Of the logits that `sparse_mixer` returns: a sigmoid of more is 1 in float32.
MIXER_LIMIT = 30.0


def embedding(ids: Tensor, table: Tensor, first: int | None = None) -> Tensor:
    """Look up a row of the table for each token.

    `first`: the token of the table's first row, where a rank has some of the rows. Tokens of other ranks
    give zeros.
    """
    if first is None:
        return functional.embedding(ids, table)
    return shard_rows(ids, first, len(table), lambda own: functional.embedding(own, table))


def shard_rows(ids: Tensor, first: int, count: int, read: Callable[[Tensor], Tensor]) -> Tensor:
    """Rows of the tokens [first, first + count), zeros for others; `read` gives rows by their index."""
    is_own = (ids >= first) & (ids < first + count)
    found = read((ids - first).clamp(0, count - 1))
    return found.masked_fill(~is_own.unsqueeze(-1), 0)


def gather(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows]"""
    return x.index_select(0, rows)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, groups: int = 1) -> Tensor:
    """Scale to unit root mean square, in float32; the weight multiplies in its own dtype.

    `groups`: the last dimension has so many parts, each of which is normalised alone.
    """
    wide = x.float().unflatten(-1, (groups, -1))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * wide.flatten(-2).to(weight.dtype)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream and normalise the sum: (normalised, new residual)."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Subtract the mean and scale to unit variance, in float32."""
    wide = functional.layer_norm(x.float(), x.shape[-1:], weight.float(), _float(bias), eps)
    return wide.to(x.dtype)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream and normalise the sum: (normalised, new residual)."""
    residual = residual + x
    return layer_norm(residual, weight, bias, eps), residual


def qk_norm(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    """Normalise all heads of q together, and all of k: the first columns, as many as the weights."""
    sizes = [len(q_weight), len(k_weight), qkv.shape[-1] - len(q_weight) - len(k_weight)]
    q, k, v = qkv.split(sizes, dim=-1)
    return torch.cat([rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps), v], dim=-1)


def group_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise each group of adjacent columns, as many as the weight has."""
    return rms_norm(x.unflatten(1, (-1, len(weight))), weight, eps).flatten(1)


def mul_columns(x: Tensor, y: Tensor, first: int) -> Tensor:
    """x times the columns of y from the first on, as many as x has."""
    return x * y[:, first : first + x.shape[1]]


def value_norm(qkv: Tensor, heads: Heads, weight: Tensor, eps: float) -> Tensor:
    """Normalise each head of v, which follows q and k."""
    before, v = qkv.tensor_split([(heads.num_q + heads.num_kv) * heads.dim], dim=1)
    v = rms_norm(v.unflatten(1, (heads.num_kv, heads.dim)), weight, eps)
    return torch.cat([before, v.flatten(1)], dim=1)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate and up are the halves of the last dimension."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu_tanh(gate) * up, where gate and up are the halves of the last dimension."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


ActivationKind = Literal["gelu", "gelu_tanh", "relu2", "silu"]


def activate(x: Tensor, kind: ActivationKind) -> Tensor:
    """The activation of an MLP without a gate. relu2: the square of max(x, 0)."""
    if kind == "silu":
        return functional.silu(x)
    if kind == "relu2":
        return functional.relu(x).square()
    return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), for x [rows, width] and gates [rows, width], or [rows, 1]: one per row."""
    return x * torch.sigmoid(gate)


def split_gates(qkv: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
    """Take the gates out of q: (q, k and v together, gates [tokens, query heads * dim]).

    In `qkv` every query head is followed by its gate.
    """
    queries, kv = qkv.tensor_split([2 * heads.num_q * heads.dim], dim=1)
    q, gate = queries.unflatten(1, (heads.num_q, 2, heads.dim)).unbind(2)
    return torch.cat([q.flatten(1), kv], dim=1), gate.flatten(1)


def scale_by_top_score(x: Tensor, logits: Tensor) -> Tensor:
    """x * sigmoid(the largest logit of the row), for x [rows, width] and logits [rows, n]."""
    return sigmoid_gate(x, logits.amax(-1, keepdim=True))


def sparse_mixer(logits: Tensor, jitter: float) -> Tensor:
    """Logits with which a sigmoid router chooses the two experts of sparsemixer, with its weights.

    An expert's weight is its share of the softmax over the candidates: experts that are not chosen yet
    and whose distance to it, relative to the larger of the two, is at most 2 * jitter.
    """
    scores = logits.float()
    out = torch.full_like(scores, -MIXER_LIMIT)
    taken = torch.zeros_like(scores, dtype=torch.bool)
    for _ in range(2):
        best, at = scores.masked_fill(taken, float("-inf")).max(-1, keepdim=True)
        taken = taken.scatter(-1, at, True)
        far = (best - scores) / scores.abs().maximum(best) > 2 * jitter
        rest = (scores - best).exp().masked_fill(far | taken, 0.0).sum(-1, keepdim=True)
        out.scatter_(-1, at, (-rest.log()).clamp(max=MIXER_LIMIT))
    return out


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Limit x to (-cap, cap): cap * tanh(x / cap), in float32."""
    return (cap * torch.tanh(x.float() / cap)).to(x.dtype)


def _float(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the pairs (i, i + rotated/2), or (2i, 2i + 1), of each head; the rest is unchanged.

    x: [tokens, heads, dim]; cos, sin: [tokens, rotated / 2] in float32
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned, rest = x.float().split([2 * half, x.shape[-1] - 2 * half], dim=-1)
    if interleaved:
        first, second = turned.unflatten(-1, (half, 2)).unbind(-1)
    else:
        first, second = turned.chunk(2, dim=-1)
    pairs = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat([turned, rest], dim=-1).to(x.dtype)


def head_norm(x: Tensor, weight: Tensor, norms: QKNorms) -> Tensor:
    """Normalise each head [tokens, heads, dim]; RMSNorm multiplies in the weight's dtype."""
    wide = x.float()
    if norms.kind == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norms.eps)
    wide = weight.float() * wide if norms.kind == "layer" else weight * wide.to(weight.dtype)
    return wide.to(x.dtype)


def rope_write(
    qkv: Tensor,
    heads: Heads,
    options: RopeOptions,
    kv: LayerKV,
    batch: StepBatch,
) -> Tensor:
    """Split q, k and v, normalise and rotate q and k, write keys and values to the pages; return q.

    qkv: [tokens, all heads * dim]. Returns [tokens, heads, dim].
    """
    sizes = [heads.num_q, heads.num_kv, heads.num_kv]
    q, k, v = qkv.view(qkv.shape[0], -1, heads.dim).split(sizes, dim=1)
    norms = options.norms
    if norms is not None:
        q, k = head_norm(q, norms.q, norms), head_norm(k, norms.k, norms)
    if options.cos_sin is not None:
        cos, sin = options.cos_sin[batch.positions].chunk(2, dim=-1)
        q, k = (rope(x, cos, sin, options.interleaved) for x in (q, k))
    slots, size = batch.token_slots, kv.block_size
    blocks = batch.table_of(kv)[slots, batch.positions // size].long()
    offsets = batch.positions % size
    for pages, scales, new in (
        (kv.keys, kv.key_scales, k),
        (kv.values, kv.value_scales, v),
    ):
        if scales is None:
            pages[blocks, :, offsets] = new.to(pages.dtype)
        else:
            codes, scale = encode(new, pages.dtype)
            pages[blocks, :, offsets] = codes
            scales[blocks, :, offsets] = scale
    return q.contiguous()


def rotate_queries(q: Tensor, heads: Heads, options: RopeOptions, batch: StepBatch) -> Tensor:
    """Normalise and rotate queries [tokens, heads * dim] whose keys are those of another layer.

    Returns [tokens, heads, dim].
    """
    q = q.unflatten(1, (heads.num_q, heads.dim))
    if options.norms is not None:
        q = head_norm(q, options.norms.q, options.norms)
    if options.cos_sin is not None:
        cos, sin = options.cos_sin[batch.positions].chunk(2, dim=-1)
        q = rope(q, cos, sin, options.interleaved)
    return q.contiguous()


# Scale of a head whose values are all zero, so that its codes are zero.
MIN_SCALE = 1e-30


def encode(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise each head [..., dim] with the scale of its largest magnitude: (codes, scales)."""
    wide = x.float()
    largest = wide.abs().amax(-1)
    # Divide by a tensor: for a Python scalar, CUDA multiplies by the reciprocal and rounds differently.
    scale = (largest / torch.full_like(largest, MAX_CODE[dtype])).clamp_min(MIN_SCALE)
    codes = wide / scale[..., None]
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scale


def read_rows(kv: LayerKV, tables: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of the blocks in `tables` [rows, blocks]: [rows, kv_heads, positions, dim].

    The dtype is that of the pages, or float32 if they hold codes.
    """
    keys, values = _gather(kv.keys, tables), _gather(kv.values, tables)
    if kv.key_scales is not None and kv.value_scales is not None:
        keys = keys.float().mul_(_gather(kv.key_scales, tables)[..., None])
        values = values.float().mul_(_gather(kv.value_scales, tables)[..., None])
    return keys, values


def _gather(pages: Tensor, tables: Tensor) -> Tensor:
    picked = pages.index_select(0, tables.flatten()).unflatten(0, tables.shape)
    return picked.transpose(1, 2).flatten(2, 3)


def read_row(kv: LayerKV, table: Tensor, context: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """Read the keys and values of a row's positions first to context: [kv_heads, positions, dim]."""
    size = kv.block_size
    keys, values = read_rows(kv, table[None, first // size : -(-context // size)])
    positions = slice(first % size, context - first // size * size)
    return keys[0, :, positions], values[0, :, positions]


def gather_blocks(pages: Tensor, ids: Tensor, records: Tensor) -> None:
    """Copy blocks of pages [planes, blocks, words] into records [ids, planes, words]."""
    records.copy_(pages[:, ids].transpose(0, 1))


def scatter_blocks(pages: Tensor, ids: Tensor, records: Tensor) -> None:
    """Copy records [ids, planes, words] into blocks of pages [planes, blocks, words]."""
    pages[:, ids] = records.transpose(0, 1)


def visible(start: int, count: int, options: AttentionOptions, device: torch.device) -> Tensor:
    """Mask of the keys, from the first visible one on, that each of `count` queries attends to."""
    query = torch.arange(start, start + count, device=device)[:, None]
    key = torch.arange(options.first_visible(start), start + count, device=device)[None, :]
    mask = key <= query
    if options.window is not None:
        mask &= key >= first_visible(query, options)
    return mask


def first_visible(positions: Tensor, options: AttentionOptions) -> Tensor:
    """`AttentionOptions.first_visible` of each position; negative ones mean all keys."""
    assert options.window is not None
    if options.chunked:
        return positions - positions % options.window
    return positions - options.window + 1


def attention_weights(scores: Tensor, mask: Tensor, options: AttentionOptions) -> Tensor:
    """The softmax over the visible keys of scaled scores [heads, queries, keys], in float32."""
    if options.soft_cap is not None:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if options.sinks is None:
        return scores.softmax(dim=-1)
    sinks = options.sinks[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]


def attention(queries: Tensor, kv: LayerKV, batch: StepBatch, options: AttentionOptions) -> Tensor:
    """Causal attention of every row over its own pages, row by row, in float32.

    queries: [tokens, heads, dim]; returns [tokens, heads, dim of a value]. Groups of query heads share
    a kv head.
    """
    out = queries.new_empty((*queries.shape[:2], kv.values.shape[-1]))
    for span in batch.spans:
        table = batch.table_of(kv)[batch.token_slots[span.first]]
        q = queries[span.first : span.first + span.count]
        keys, values = read_row(kv, table, span.context, options.first_visible(span.start))
        group = q.shape[1] // keys.shape[0]
        keys = keys.float().repeat_interleave(group, dim=0)
        values = values.float().repeat_interleave(group, dim=0)
        scores = torch.einsum("qhd,hkd->hqk", q.float(), keys) * options.scale
        mask = visible(span.start, span.count, options, q.device)
        weights = attention_weights(scores, mask, options)
        mixed = torch.einsum("hqk,hkd->qhd", weights, values)
        out[span.first : span.first + span.count] = mixed.to(out.dtype)
    return out
