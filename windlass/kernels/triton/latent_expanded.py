"""MLA of long prompt chunks on CUDA, with keys and values that are computed for every head.

Absorbed weights make attention read the cached latents themselves, at 3.4 times the arithmetic per
query and key (DeepSeek's sizes). That suits decodes, which wait for memory. The tokens of a long chunk
share the cost of expanding keys and values. Cached tokens before a chunk are expanded piece by piece; the
softmax state between pieces is the output so far, and the logarithm of its sum of weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.core.mla import LatentHeads
from windlass.kernels.batch import ExpandedContext, LayerKV, StepBatch
from windlass.kernels.latent import LatentWeights
from windlass.kernels.triton import pdl
from windlass.kernels.triton.latent import (
    absorb_keys,
    latent_attention,
    latent_outputs,
    write_latents,
)

_LOG2_E = 1.4426950408889634
_ROWS = 128  # tokens of a tile
_MIN_DOT = 16  # the least size of each axis of a product
_MIN_PIECE = 2048  # cached tokens that are expanded at a time


@triton.jit
def _scan(
    state, q, q_rope, query, keys, rope_keys, values, begin, end, num_keys, scale,
    key_token, rope_token, value_token, NOPE: tl.constexpr, ROPE: tl.constexpr,
    VALUE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend from rows at positions `query` to the keys of tiles begin to end (online softmax)."""
    m, total, acc = state
    at = tl.arange(0, TILE)
    d, e = tl.arange(0, q.shape[1]), tl.arange(0, q_rope.shape[1])
    v = tl.arange(0, acc.shape[1])
    for tile in range(begin, end):
        position = tile * TILE + at
        row = position.to(tl.int64)
        k_mask, r_mask, v_mask = (d < NOPE)[:, None], (e < ROPE)[:, None], (v < VALUE)[None, :]
        if MASKED:
            seen = position < num_keys
            k_mask, r_mask = k_mask & seen[None, :], r_mask & seen[None, :]
            v_mask = v_mask & seen[:, None]
        k_tile = tl.load(keys + row[None, :] * key_token + d[:, None], mask=k_mask, other=0.0)
        r_tile = tl.load(rope_keys + row[None, :] * rope_token + e[:, None], mask=r_mask, other=0.0)
        v_tile = tl.load(values + row[:, None] * value_token + v[None, :], mask=v_mask, other=0.0)
        scores = tl.dot(q_rope, r_tile, tl.dot(q, k_tile)) * scale
        if MASKED:
            visible = (position[None, :] <= query[:, None]) & (position < num_keys)[None, :]
            scores = tl.where(visible, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        # A row without keys so far stays at -inf, and exp2(-inf - -inf) would be NaN.
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        weights = tl.exp2(scores - m_safe[:, None])
        shrink = tl.exp2(m - m_safe)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * shrink[:, None])
        m = m_new
    return m, total, acc


@triton.jit(do_not_specialize=["num_keys"])
def expanded_prefill_kernel(
    q, rotated, keys, rope_keys, values, out, sums, tiles, num_keys, scale,
    q_token, q_head, rotated_token, rotated_head, key_token, key_head, rope_token,
    value_token, value_head,
    NUM_Q: tl.constexpr, NOPE: tl.constexpr, NOPE_PAD: tl.constexpr, ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr, VALUE: tl.constexpr, VALUE_PAD: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, CACHED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of a chunk and one head.

    CACHED: the keys are `num_keys` cached tokens before the chunk; else they are the chunk's own. `sums`
    [tokens, heads] has the logarithms of the sums of weights so far, and -inf for rows without.
    """
    pdl.begin(PDL)
    tile, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(tiles + tile * 4).to(tl.int64)
    count = tl.load(tiles + tile * 4 + 1)
    r, d, e = tl.arange(0, ROWS), tl.arange(0, NOPE_PAD), tl.arange(0, ROPE_PAD)
    v = tl.arange(0, VALUE_PAD)
    inside = r < count
    rows = (token + r)[:, None]
    q_at = q + rows * q_token + head * q_head + d[None, :]
    q_tile = tl.load(q_at, mask=inside[:, None] & (d < NOPE)[None, :], other=0.0)
    rope_at = rotated + rows * rotated_token + head * rotated_head + e[None, :]
    q_rope = tl.load(rope_at, mask=inside[:, None] & (e < ROPE)[None, :], other=0.0)
    out_at = out + (rows * NUM_Q + head) * VALUE + v[None, :]
    out_mask = inside[:, None] & (v < VALUE)[None, :]
    m = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    acc = tl.zeros([ROWS, VALUE_PAD], dtype=tl.float32)
    if sums is not None:
        m = tl.load(sums + (token + r) * NUM_Q + head, mask=inside, other=float("-inf"))
        resumed = m > float("-inf")
        total = tl.where(resumed, 1.0, 0.0)
        acc = tl.load(out_at, mask=out_mask & resumed[:, None], other=0.0).to(tl.float32)
    keys += head.to(tl.int64) * key_head
    values += head.to(tl.int64) * value_head
    query = r + num_keys
    unmasked = num_keys // TILE
    last = num_keys
    if not CACHED:
        origin = tl.load(tiles + tile * 4 + 2).to(tl.int64)
        keys += origin * key_token
        rope_keys += origin * rope_token
        values += origin * value_token
        start = tl.load(tiles + tile * 4 + 3)
        query = start + r
        unmasked = (start + 1) // TILE
        last = start + count
    state = (m, total, acc)
    state = _scan(
        state, q_tile, q_rope, query, keys, rope_keys, values, 0, unmasked, last, scale,
        key_token, rope_token, value_token, NOPE, ROPE, VALUE, TILE, False,
    )  # fmt: skip
    m, total, acc = _scan(
        state, q_tile, q_rope, query, keys, rope_keys, values, unmasked, tl.cdiv(last, TILE), last,
        scale, key_token, rope_token, value_token, NOPE, ROPE, VALUE, TILE, True,
    )  # fmt: skip
    total = tl.where(inside, total, 1.0)
    if CACHED:
        tl.store(sums + (token + r) * NUM_Q + head, m + tl.log2(total), mask=inside)
    tl.store(out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=out_mask)


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
    """Same contract as `Ops.attend_latent`, for a step with `ExpandedChunks`."""
    work = batch.work
    assert work is not None
    assert work.expanded is not None
    tokens = q.shape[0]
    queries = q.new_empty((tokens, heads.num_q, heads.dim))
    rotated = queries[..., heads.rank :]
    fresh = q.new_empty((tokens, heads.dim))
    write_latents(projected, q, rotated, heads, weights, cos_sin, kv, batch, fresh)
    if work.singles.shape[0] or work.tiles.shape[0]:
        absorb_keys(queries, q, heads, weights, batch)
        mixed = latent_attention(queries, kv, batch, scale, heads.rank)
        out = latent_outputs(mixed, weights, batch)
    else:
        out = q.new_empty((tokens, heads.num_q * heads.value_dim))
    chunks = _Expanded(q, rotated, out, heads, weights, scale)
    sums: Tensor | None = None
    if work.expanded.contexts:
        sums = q.new_full((tokens, heads.num_q), float("-inf"), dtype=torch.float32)
    for context in work.expanded.contexts:
        for piece in _pieces(context, kv, batch, q.dtype, max(_MIN_PIECE, tokens)):
            chunks.attend(piece, context.tiles, sums, num_keys=piece.shape[0])
    chunks.attend(fresh, work.expanded.tiles, sums)
    return out


def _pieces(
    context: ExpandedContext, kv: LayerKV, batch: StepBatch, dtype: torch.dtype, size: int
) -> Iterator[Tensor]:
    """The cached latents before a chunk, about `size` at a time."""
    table = batch.table_of(kv)[context.slot]
    per_piece = max(1, size // kv.block_size)
    for first in range(0, triton.cdiv(context.num_tokens, kv.block_size), per_piece):
        blocks = table[first : first + per_piece].long()
        latents = kv.keys[blocks]
        if kv.key_scales is not None:
            latents = latents.float() * kv.key_scales[blocks][..., None]
        left = context.num_tokens - first * kv.block_size
        yield latents.to(dtype).flatten(0, 2)[:left]


class _Expanded:
    """The queries of a step, which attend to expanded latents."""

    def __init__(
        self,
        q: Tensor,
        rotated: Tensor,
        out: Tensor,
        heads: LatentHeads,
        weights: LatentWeights,
        scale: float,
    ) -> None:
        self._q, self._rotated, self._out = q, rotated, out
        self._heads, self._weights = heads, weights
        self._scale = scale * _LOG2_E

    def attend(
        self, latents: Tensor, tiles: Tensor, sums: Tensor | None, num_keys: int | None = None
    ) -> None:
        """Attend from `tiles` to latents [keys, dim]. `num_keys`: they are cached, before the chunk."""
        heads, q = self._heads, self._q
        keys, values = self._keys_and_values(latents[:, : heads.rank])
        rope_keys = latents[:, heads.rank :]
        expanded_prefill_kernel[(tiles.shape[0], heads.num_q)](
            q,
            self._rotated,
            keys,
            rope_keys,
            values,
            self._out,
            sums,
            tiles,
            num_keys or 0,
            self._scale,
            q.stride(0),
            heads.query_dim,
            *self._rotated.stride()[:2],
            *keys.stride()[:2],
            rope_keys.stride(0),
            *values.stride()[:2],
            CACHED=num_keys is not None,
            **_sizes(heads),
            **_options(),
            **pdl.options(),
        )

    def _keys_and_values(self, low: Tensor) -> tuple[Tensor, Tensor]:
        """Of every head, [tokens, heads, dim] each, without the rotated part of keys."""
        weights, heads = self._weights, self._heads
        if weights.joint is not None:
            both = (low @ weights.joint.flatten(0, 1).T).unflatten(1, weights.joint.shape[:2])
            keys, values = both.split([heads.nope_dim, heads.value_dim], dim=2)
            return keys, values
        return (low @ weights.keys.mT).transpose(0, 1), (low @ weights.values.mT).transpose(0, 1)


def _padded(size: int) -> int:
    return max(_MIN_DOT, triton.next_power_of_2(size))


def _sizes(heads: LatentHeads) -> dict[str, int]:
    return {
        "NUM_Q": heads.num_q,
        "NOPE": heads.nope_dim,
        "NOPE_PAD": _padded(heads.nope_dim),
        "ROPE": heads.rope_dim,
        "ROPE_PAD": _padded(heads.rope_dim),
        "VALUE": heads.value_dim,
        "VALUE_PAD": _padded(heads.value_dim),
    }


def _options() -> dict[str, int]:
    """Tiling and launch options."""
    return {"ROWS": _ROWS, "TILE": 64, "num_warps": 8, "num_stages": 3}
