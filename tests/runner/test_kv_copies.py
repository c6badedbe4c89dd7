"""Blocks come back from host memory bit by bit, in every layout."""

from __future__ import annotations

import pytest
import torch

from tests.runner.kv_copy_cases import LAYOUTS, NUM_BLOCKS, make_cache, snapshot
from windlass.config import CacheConfig
from windlass.core.types import BlockId
from windlass.errors import ConfigError, EngineError
from windlass.kernels.batch import KVCache, LayerState
from windlass.runner import device, host_rows
from windlass.runner.host_rows import HostRows
from windlass.runner.kv_copies import make_block_copies, measure_write_rate, reserved_bytes
from windlass.runner.kv_records import BlockCopies

CPU = torch.device("cpu")
# Block ids of one copy: one, a run, out of order, all.
SELECTIONS = [[4], [3, 4, 5], [10, 0, 7], list(range(NUM_BLOCKS))]


def ids(numbers: list[int]) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


def copies_of(*names: str, num_rows: int = 16) -> tuple[BlockCopies, list[KVCache]]:
    caches = [make_cache(name, seed=seed) for seed, name in enumerate(names)]
    num_bytes = sum(pages[:, 0].nbytes for cache in caches for pages in cache.planes())
    return make_block_copies(caches, num_rows * num_bytes), caches


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_planes_of_a_block_are_its_pages(name: str) -> None:
    """Clears block 2 through the layers, and finds it in the planes."""
    cache = make_cache(name)
    before = snapshot(cache)
    for layer in cache.layers:
        if isinstance(layer, LayerState):
            tensors = [layer.pages]
        else:
            found = (layer.keys, layer.values, layer.key_scales, layer.value_scales)
            tensors = [tensor for tensor in found if tensor is not None]
        for tensor in tensors:
            tensor[2].zero_()
    changed = [
        (a != b).any(dim=(0, 2)).tolist() for a, b in zip(before, snapshot(cache), strict=True)
    ]
    assert changed == [[block == 2 for block in range(NUM_BLOCKS)]] * len(before)
    layout, _ = LAYOUTS[name]
    assert sum(pages[:, 0].nbytes for pages in cache.planes()) == layout.block_bytes


@pytest.mark.parametrize("blocks", SELECTIONS, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_round_trip(name: str, blocks: list[int]) -> None:
    copies, (cache,) = copies_of(name)
    layout, _ = LAYOUTS[name]
    assert copies.record_bytes == copies.rows.row_bytes == layout.block_bytes
    before = snapshot(cache)
    rows = [15 - 2 * i if i < 8 else 2 * (i - 8) for i in range(len(blocks))]
    pending = copies.read(ids(blocks), rows)
    pending.wait()
    assert pending.done()
    for pages in cache.planes():
        pages.zero_()
    assert copies.write(rows, ids(blocks)).done()
    for was, now in zip(before, snapshot(cache), strict=True):
        assert torch.equal(now[:, blocks], was[:, blocks])
        others = [block for block in range(NUM_BLOCKS) if block not in blocks]
        assert not now[:, others].any()


@pytest.mark.parametrize("name", LAYOUTS)
def test_records_move_to_other_blocks_through_bytes(name: str) -> None:
    """What a store writes elsewhere and reads again is the same block."""
    copies, (cache,) = copies_of(name)
    before = snapshot(cache)
    copies.read(ids([1, 9]), [0, 5]).wait()
    stored = [bytes(copies.rows.row(row)) for row in (0, 5)]
    assert [len(record) for record in stored] == [copies.record_bytes] * 2
    for row, record in zip((7, 6), stored, strict=True):
        copies.rows.row(row)[:] = record
    copies.write([7, 6], ids([9, 1])).wait()
    for was, now in zip(before, snapshot(cache), strict=True):
        was[:, [1, 9]] = was[:, [9, 1]]
        assert torch.equal(now, was)


def test_a_drafters_blocks_are_part_of_the_record() -> None:
    copies, caches = copies_of("bf16", "a TP rank")
    before = [snapshot(cache) for cache in caches]
    copies.read(ids([2, 3]), [0, 1]).wait()
    copies.write([1, 0], ids([2, 3])).wait()
    for was, cache in zip(before, caches, strict=True):
        for expected, now in zip(was, snapshot(cache), strict=True):
            expected[:, [2, 3]] = expected[:, [3, 2]]
            assert torch.equal(now, expected)


def test_no_block_is_nothing() -> None:
    copies, (cache,) = copies_of("bf16")
    before = snapshot(cache)
    copies.read([], []).wait()
    copies.write([], []).wait()
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(cache), strict=True))


def test_a_cpus_cache_leaves_memory_for_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "free_bytes", lambda _: 10 * 2**30)
    layout, _ = LAYOUTS["bf16"]
    config = CacheConfig(kv_offload_gb=8)
    reserved = reserved_bytes(config, layout.block_bytes, CPU, num_ranks=2)
    assert reserved == 4 * 2**30
    assert reserved_bytes(CacheConfig(), layout.block_bytes, CPU) == 0
    on_disk = CacheConfig(prefix_cache_dir="cache")
    assert reserved_bytes(on_disk, layout.block_bytes, CPU) == 256 * 2**20
    found = device.size_cache(config, layout, CPU, 0.5, 2**40, reserved=reserved)
    assert found.num_blocks == 3 * 2**30 // layout.block_bytes
    assert "10.0 GiB free memory without 4.0 GiB for KV offload" in found.reason


@pytest.mark.parametrize("num_rows", [1, 16])
def test_the_rate_is_measured_on_blocks_that_stay(num_rows: int) -> None:
    copies, (cache,) = copies_of("states", num_rows=num_rows)
    before = snapshot(cache)
    assert measure_write_rate(copies) > 0
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(cache), strict=True))


@pytest.mark.parametrize(
    ("blocks", "rows", "message"),
    [
        ([1, 2, 1], [0, 1, 2], "blocks twice"),
        ([1, 2], [3, 3], "rows twice"),
        ([1, 2], [3], "2 blocks names 1 rows"),
        ([NUM_BLOCKS], [0], f"there are only {NUM_BLOCKS}"),
        ([-1], [0], f"there are only {NUM_BLOCKS}"),
        ([1], [16], "there are only 16"),
    ],
)
def test_bad_copies_are_refused(blocks: list[int], rows: list[int], message: str) -> None:
    copies, (cache,) = copies_of("bf16")
    before = snapshot(cache)
    for call in (
        lambda: copies.read(ids(blocks), rows),
        lambda: copies.write(rows, ids(blocks)),
    ):
        with pytest.raises(EngineError, match=message):
            call()
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(cache), strict=True))


def test_rows_span_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_rows, "_PIECE_BYTES", 1000)
    rows = HostRows(7, 300)
    assert [tensor.shape for _, tensor in rows.storages()] == [(3, 300), (3, 300), (1, 300)]
    for index in range(7):
        rows.row(index)[:] = bytes([index]) * 300
    for index in range(7):
        assert rows.tensor(index).tolist() == [index] * 300


def test_more_than_the_machines_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="Lower --kv-offload-gb"):
        HostRows(2**40, 4096)
    with pytest.raises(ConfigError, match="0 B are free"):
        HostRows(1, 4096, beside=2**60)
