"""MLA over latent pages: absorbed attention against keys and values that are expanded for every head."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from windlass.core.mla import LatentHeads
from windlass.errors import UnsupportedError
from windlass.kernels import latent
from windlass.kernels.batch import KVCache, Span, StepBatch, attention_layout, latent_layout
from windlass.kernels.latent import LatentWeights

CPU = torch.device("cpu")
HEADS = LatentHeads(num_q=3, nope_dim=16, rope_dim=8, rank=24, value_dim=20)
SIZE, SCALE = 4, 0.2


def make_weights(heads: LatentHeads = HEADS) -> LatentWeights:
    up = torch.randn(heads.num_q, heads.nope_dim + heads.value_dim, heads.rank) / 5
    keys, values = up.split([heads.nope_dim, heads.value_dim], 1)
    return LatentWeights(norm=torch.rand(heads.rank) + 0.5, eps=1e-6, keys=keys, values=values)


def make_table(heads: LatentHeads = HEADS) -> Tensor:
    angle = torch.rand(64, heads.rope_dim // 2) * 6
    return torch.cat([angle.cos(), angle.sin()], -1)


def make_cache(dtype: torch.dtype = torch.float32, num_layers: int = 1) -> KVCache:
    layout = latent_layout(num_layers, dim=HEADS.dim, block_size=SIZE, dtype=dtype)
    return KVCache(layout, 40, dtype, CPU)


def make_batch(rows: list[tuple[int, int]], cache: KVCache) -> StepBatch:
    """Rows of (start, count); a row's blocks are those of its place in `rows`."""
    tables = torch.arange(40).view(2, 20).flip(1).int()[None]
    spans, positions, slots, first = [], [], [], 0
    for slot, (start, count) in enumerate(rows):
        if count:
            spans.append(Span(first, count, start))
        positions += range(start, start + count)
        slots += [slot] * count
        first += count
    return StepBatch(torch.tensor(positions), torch.tensor(slots), tables, spans, cache.layers)


def plain(q: Tensor, rows: Tensor, weights: LatentWeights, table: Tensor, heads: LatentHeads):
    """MLA of one request from position 0, with keys and values of every head."""
    count = len(q)

    def turn(x: Tensor) -> Tensor:
        pairs = x.unflatten(-1, (-1, 2)) if heads.interleaved else x.unflatten(-1, (2, -1)).mT
        cos, sin = (part[:count, None] for part in table.chunk(2, -1))
        turned = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin)
        return torch.view_as_real(turned).flatten(-2)

    low, key = rows.split([heads.rank, heads.rope_dim], -1)
    low = torch.nn.functional.rms_norm(low, (heads.rank,), weights.norm, weights.eps)
    k, v = torch.einsum("tr,hdr->thd", low, torch.cat([weights.keys, weights.values], 1)).split(
        [heads.nope_dim, heads.value_dim], -1
    )
    k = torch.cat([k, turn(key[:, None]).expand(-1, heads.num_q, -1)], -1)
    nope, positional = q.view(count, heads.num_q, -1).split([heads.nope_dim, heads.rope_dim], -1)
    q = torch.cat([nope, turn(positional)], -1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    hidden = torch.ones(count, count, dtype=torch.bool).triu(1)
    weights_of = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights_of, v).flatten(1)


def run_chunks(chunks, cache, weights, table, inputs, heads=HEADS, attention=None, **options):
    """Compute two requests in steps; each step has the tokens of both."""
    out: list[list[Tensor]] = [[], []]
    done = [0, 0]
    attention = attention or latent.latent_attention
    for counts in chunks:
        batch = replace(make_batch(list(zip(done, counts, strict=True)), cache), **options)
        parts = [
            [each[slot][done[slot] : done[slot] + count] for slot, count in enumerate(counts)]
            for each in inputs
        ]
        q, rows = (torch.cat(each) for each in parts)
        kv = cache.layers[0]
        queries = latent.latent_queries(rows, q, heads, weights, table, kv, batch)
        mixed = attention(queries, kv, batch, SCALE, heads.rank)
        outputs = latent.latent_outputs(mixed, weights, batch)
        for slot, part in enumerate(outputs.split(list(counts))):
            out[slot].append(part)
        done = [a + b for a, b in zip(done, counts, strict=True)]
    return [torch.cat(each) for each in out]


def make_inputs(heads: LatentHeads = HEADS) -> tuple[list[Tensor], list[Tensor]]:
    counts = (19, 13)
    return (
        [torch.randn(n, heads.num_q * heads.query_dim) for n in counts],
        [torch.randn(n, heads.dim) for n in counts],
    )


CHUNKS = [(7, 0), (1, 5), (6, 1), (1, 6), (4, 1)]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("batch_invariant", [True, False])
@pytest.mark.parametrize("name", ["latent_attention", "torch_latent_attention"])
def test_absorbed_attention_equals_expanded_keys_and_values(
    interleaved: bool, batch_invariant: bool, name: str
) -> None:
    torch.manual_seed(1)
    heads = replace(HEADS, interleaved=interleaved)
    weights, table, inputs = make_weights(), make_table(), make_inputs()
    got = run_chunks(
        CHUNKS,
        make_cache(),
        weights,
        table,
        inputs,
        heads,
        getattr(latent, name),
        batch_invariant=batch_invariant,
    )
    for q, rows, each in zip(*inputs, got, strict=True):
        want = plain(q, rows, weights, table, heads)
        torch.testing.assert_close(each, want, atol=1e-5, rtol=1e-4)


def test_a_batch_invariant_row_is_the_same_in_any_chunks() -> None:
    torch.manual_seed(2)
    weights, table, inputs = make_weights(), make_table(), make_inputs()
    whole, *others = (
        run_chunks(
            chunks,
            make_cache(),
            weights,
            table,
            inputs,
            attention=latent.torch_latent_attention,
            batch_invariant=True,
        )
        for chunks in ([(19, 13)], CHUNKS, [(18, 1), (1, 12)])
    )
    for other in others:
        assert all(map(torch.equal, whole, other))


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.int8, 0.02), (torch.float8_e4m3fn, 0.06), (torch.float16, 1e-3)]
)
def test_latent_codes_are_close(dtype: torch.dtype, most: float) -> None:
    torch.manual_seed(3)
    weights, table, inputs = make_weights(), make_table(), make_inputs()
    want = run_chunks(CHUNKS, make_cache(), weights, table, inputs)
    got = run_chunks(CHUNKS, make_cache(dtype), weights, table, inputs)
    for ours, exact in zip(got, want, strict=True):
        assert (ours - exact).norm() < most * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_latent_pages_are_copied_and_counted(dtype: torch.dtype) -> None:
    cache = make_cache(dtype, num_layers=3)
    layout = latent_layout(3, dim=HEADS.dim, block_size=SIZE, dtype=dtype)
    scale_bytes = 4 if dtype == torch.int8 else 0
    assert layout.token_bytes == 3 * (HEADS.dim * dtype.itemsize + scale_bytes)
    assert cache.num_bytes == 40 * layout.block_bytes
    assert sum(tensor.nbytes for _, tensor in cache.storages()) == cache.num_bytes
    for layer in cache.layers:
        assert layer.keys.shape == (40, 1, SIZE, HEADS.dim)
        assert layer.keys.data_ptr() == layer.values.data_ptr()
        layer.keys.copy_(torch.arange(40).view(40, 1, 1, 1))
        if layer.key_scales is not None:
            layer.key_scales.copy_(torch.arange(40).view(40, 1, 1))
    cache.copy([(3, 5), (5, 7)])
    for layer in cache.layers:
        assert [int(layer.keys[block].unique()) for block in (3, 5, 7)] == [3, 3, 5]
        if layer.key_scales is not None:
            assert [int(layer.key_scales[block].unique()) for block in (3, 5, 7)] == [3, 3, 5]


def test_latent_and_other_pages_cannot_be_mixed() -> None:
    full = attention_layout([None], num_kv_heads=2, dim=8, block_size=4, dtype=torch.float32)
    kept = latent_layout(2, dim=8, block_size=4, dtype=torch.float32)
    groups = (full.groups[0], replace(kept.groups[0], layers=(1, 2)))
    with pytest.raises(UnsupportedError, match="full, latent"):
        KVCache(replace(kept, groups=groups), 2, torch.float32, CPU)
