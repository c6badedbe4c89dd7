"""torch's fused attention against the reference, for single tokens, odd sizes and prefixes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from windlass.core.kv_layout import KVGroup, KVLayout
from windlass.core.types import NO_BLOCK
from windlass.errors import UnsupportedError
from windlass.kernels import batch_invariant_attention, reference, torch_attention
from windlass.kernels.attention_options import AttentionOptions, RopeOptions
from windlass.kernels.batch import Heads, KVCache, LayerKV, Span, StepBatch, attention_layout

CPU = torch.device("cpu")


def make_layout(
    num_layers: int, page: tuple[int, int, int], dtype: torch.dtype, window: int | None = None
) -> KVLayout:
    """A layout of pages [kv_heads, block_size, dim]."""
    heads, size, dim = page
    windows = [window] * num_layers
    return attention_layout(windows, num_kv_heads=heads, dim=dim, block_size=size, dtype=dtype)


def make_cache(num_layers: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> KVCache:
    """A cache of [blocks, kv_heads, block_size, dim]."""
    num_blocks, *page = shape
    return KVCache(make_layout(num_layers, tuple(page), dtype), num_blocks, dtype, CPU)


def make_batch(
    rows: list[tuple[int, int]], kv_heads: int, dim: int, size: int
) -> tuple[LayerKV, StepBatch]:
    """Rows of (start, count) over shuffled pages of random values."""
    random = torch.Generator().manual_seed(3)
    needed = [-(-(start + count) // size) for start, count in rows]
    num_blocks = sum(needed) + 3
    order = torch.randperm(num_blocks, generator=random)
    tables = torch.zeros(len(rows), max(needed), dtype=torch.int64)
    spans, at, first = [], 0, 0
    for i, ((start, count), blocks) in enumerate(zip(rows, needed, strict=True)):
        tables[i, :blocks] = order[at : at + blocks]
        spans.append(Span(first, count, start))
        at += blocks
        first += count
    shape = (num_blocks, kv_heads, size, dim)
    kv = LayerKV(torch.randn(shape, generator=random), torch.randn(shape, generator=random))
    positions = torch.cat([torch.arange(s, s + c) for s, c in rows])
    slots = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([c for _, c in rows]))
    return kv, StepBatch(
        positions=positions, token_slots=slots, tables=tables[None], spans=spans, kv=[kv]
    )


@pytest.mark.parametrize("window", [None, 1, 5, 1000])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 64), (6, 2, 32), (9, 3, 64)])
@pytest.mark.parametrize(
    "rows",
    [
        [(0, 1)],
        [(0, 37)],
        [(17, 1), (0, 1), (63, 1)],
        [(5, 1), (0, 9), (16, 16), (40, 1), (31, 2)],
    ],
)
def test_fused_equals_reference(rows, heads, kv_heads, dim, window, chunked) -> None:
    options = AttentionOptions(dim**-0.5, window, chunked=chunked)
    kv, batch = make_batch(rows, kv_heads, dim, size=16)
    queries = torch.randn(sum(c for _, c in rows), heads, dim)
    want = reference.attention(queries, kv, batch, options)
    got = torch_attention.attention(queries, kv, batch, options)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def hide_behind_window(
    kv: LayerKV, batch: StepBatch, options: AttentionOptions
) -> tuple[LayerKV, StepBatch]:
    """The same rows with NaN in the blocks behind the window, half of which have no table entry."""
    kv = replace(kv, keys=kv.keys.clone(), values=kv.values.clone())
    batch = replace(batch, tables=batch.tables.clone())
    num_hidden = 0
    for span in batch.spans:
        slot = batch.token_slots[span.first]
        for index in range(options.first_visible(span.start) // kv.block_size):
            block = int(batch.tables[kv.group, slot, index])
            kv.keys[block] = kv.values[block] = float("nan")
            num_hidden += 1
            if index % 2:
                batch.tables[kv.group, slot, index] = NO_BLOCK
    assert num_hidden
    return kv, batch


@pytest.mark.parametrize("window", [1, 7, 16, 40])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("rows", [[(63, 1), (90, 1)], [(70, 9)], [(50, 1), (64, 40), (81, 1)]])
def test_no_kernel_reads_behind_the_window(rows, chunked, window) -> None:
    options = AttentionOptions(0.2, window, chunked=chunked)
    kv, batch = make_batch(rows, 2, 32, size=8)
    queries = torch.randn(sum(c for _, c in rows), 6, 32)
    freed = hide_behind_window(kv, batch, options)
    for kernel in (reference, torch_attention, batch_invariant_attention):
        want = kernel.attention(queries, kv, batch, options)
        assert torch.equal(kernel.attention(queries, *freed, options), want)
        exact = reference.attention(queries, kv, batch, options)
        torch.testing.assert_close(want, exact, atol=1e-5, rtol=1e-4)


def test_layers_of_two_groups_use_their_own_tables() -> None:
    layout = attention_layout(
        [None, 5, None, 5], num_kv_heads=2, dim=16, block_size=4, dtype=torch.float32
    )
    cache = KVCache(layout, 9, torch.float32, CPU)
    assert [layer.group for layer in cache.layers] == [0, 1, 0, 1]
    assert cache.num_bytes == 9 * layout.block_bytes
    assert cache.layers[0].keys.data_ptr() == cache.layers[1].keys.data_ptr()
    tables = torch.tensor([[[3, 1, 4]], [[0, 5, 2]]])
    positions, slots = torch.arange(11), torch.zeros(11, dtype=torch.long)
    batch = StepBatch(positions, slots, tables, [Span(0, 11, 0)], cache.layers)
    cos_sin = torch.rand(16, 16)
    for seed, (layer, window) in enumerate(zip(cache.layers, (None, 5, None, 5), strict=True)):
        qkv = torch.randn(11, 8 * 16, generator=torch.Generator().manual_seed(seed))
        queries = reference.rope_write(qkv, Heads(4, 2, 16), RopeOptions(cos_sin), layer, batch)
        own = make_cache(1, (9, 2, 4, 16), torch.float32).layers[0]
        plain = replace(batch, tables=tables[layer.group][None], kv=[own])
        reference.rope_write(qkv, Heads(4, 2, 16), RopeOptions(cos_sin), own, plain)
        want = reference.attention(queries, own, plain, AttentionOptions(0.2, window))
        for kernel in (reference, torch_attention, batch_invariant_attention):
            got = kernel.attention(queries, layer, batch, AttentionOptions(0.2, window))
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_only_keys_and_values_of_one_shape_have_pages() -> None:
    latent = KVGroup(kind="latent", layers=(0,), page=(4, 64), item_bytes=4)
    full = KVGroup(kind="full", layers=(1,), page=(2, 2, 4, 16), item_bytes=4)
    with pytest.raises(UnsupportedError, match="groups of the kinds full, latent"):
        KVCache(KVLayout.of([latent, full], 4), 2, torch.float32, CPU)


def test_row_does_not_depend_on_other_rows() -> None:
    kv, batch = make_batch([(20, 1), (3, 4), (50, 1)], 2, 32, size=8)
    queries = torch.randn(6, 4, 32)
    together = torch_attention.attention(queries, kv, batch, AttentionOptions(0.2))
    for span in batch.spans:
        part = slice(span.first, span.first + span.count)
        alone = StepBatch(
            positions=batch.positions[part],
            token_slots=batch.token_slots[part],
            tables=batch.tables,
            spans=[Span(0, span.count, span.start)],
            kv=[kv],
        )
        got = torch_attention.attention(queries[part], kv, alone, AttentionOptions(0.2))
        torch.testing.assert_close(got, together[part], atol=1e-5, rtol=1e-4)


def test_soft_cap_bounds_the_scores() -> None:
    kv, batch = make_batch([(10, 3)], 1, 16, size=4)
    queries = torch.randn(3, 2, 16) * 100
    uncapped = reference.attention(queries, kv, batch, AttentionOptions(1.0))
    capped = reference.attention(queries, kv, batch, AttentionOptions(1.0, soft_cap=0.01))
    flat = torch.stack(
        [reference.read_row(kv, batch.tables[0, 0], n)[1][0].mean(0) for n in (11, 12, 13)]
    )
    torch.testing.assert_close(capped[:, 0], flat, atol=0.05, rtol=0.05)
    assert (uncapped - capped).abs().max() > 0.1


def test_copy_reads_all_sources_before_it_writes() -> None:
    cache = make_cache(2, (4, 1, 2, 3), torch.float32)
    for layer in cache.layers:
        layer.keys[:] = torch.arange(4.0)[:, None, None, None]
    cache.copy([(0, 1), (1, 2)])
    assert cache.layers[1].keys[:, 0, 0, 0].tolist() == [0, 0, 1, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pages_are_zero_and_have_their_dtype(dtype: torch.dtype) -> None:
    cache = make_cache(1, (3, 2, 4, 8), dtype)
    assert cache.layers[0].keys.dtype == dtype
    assert not cache.layers[0].values.any()
    assert cache.num_bytes == 2 * 3 * 2 * 4 * 8 * dtype.itemsize
