"""Copies of KV blocks on a GPU, while the stream of the steps overwrites and reads them."""

from __future__ import annotations

import gc
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.runner.kv_copy_cases import LAYOUTS, NUM_BLOCKS, make_cache, snapshot
from windlass.core.types import BlockId
from windlass.kernels.batch import KVCache, attention_layout
from windlass.runner import host_rows
from windlass.runner.cuda import kv_copies
from windlass.runner.kv_copies import make_block_copies, measure_write_rate
from windlass.runner.kv_records import BlockCopies, RecordLayout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LONG = 200_000_000  # cycles: the host goes on while the GPU is busy
NUM_ROWS = 64


def open_copies(
    cache: KVCache, monkeypatch: pytest.MonkeyPatch, *, chunk: int = 4, plain: bool = False
) -> BlockCopies:
    """Copies with staging for `chunk` blocks at a time."""
    num_bytes = RecordLayout([cache]).record_bytes
    monkeypatch.setattr(kv_copies, "_CHUNK_BYTES", chunk * num_bytes)
    return make_block_copies([cache], NUM_ROWS * num_bytes, plain_kernels=plain)


def ids(blocks: list[int]) -> list[BlockId]:
    return [BlockId(block) for block in blocks]


def wide_cache(num_blocks: int = 40) -> KVCache:
    layout = attention_layout(
        (None,) * 4, num_kv_heads=4, dim=64, block_size=16, dtype=torch.bfloat16
    )
    return KVCache(layout, num_blocks, torch.bfloat16, torch.device("cuda"))


def fill(cache: KVCache, block: int, byte: int) -> None:
    for pages in cache.planes():
        pages[:, block] = byte


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_round_trip(name: str, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(name, "cuda")
    copies = open_copies(cache, monkeypatch, plain=plain)
    before = snapshot(cache)
    blocks = list(reversed(range(NUM_BLOCKS)))
    rows = [*range(12, 17), *range(3, 9)]
    copies.read(ids(blocks), rows).wait()
    host = make_block_copies([make_cache(name)], NUM_ROWS * copies.record_bytes)
    host.read(ids(blocks), rows).wait()
    # A record does not depend on the device.
    assert [bytes(copies.rows.row(row)) for row in rows] == [
        bytes(host.rows.row(row)) for row in rows
    ]
    for pages in cache.planes():
        pages.zero_()
    copies.write(rows[:-1], ids(blocks[:-1])).wait()
    for was, now in zip(before, snapshot(cache), strict=True):
        assert torch.equal(now[:, 1:], was[:, 1:])
        assert not now[:, 0].any()
    copies.close()


def test_the_host_does_not_wait_and_the_next_step_may_overwrite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = wide_cache()
    copies = open_copies(cache, monkeypatch)
    for _ in range(2):  # the first time, kernels are compiled and pinned ids allocated
        for block in range(30):
            fill(cache, block, block + 1)
        torch.cuda._sleep(LONG)
        pending = copies.read(ids(list(range(30))), list(range(30)))  # more than the staging holds
        for block in range(30):
            fill(cache, block, 200)
    assert not pending.done()
    pending.wait()
    assert pending.done()
    for row in range(30):
        assert set(bytes(copies.rows.row(row))) == {row + 1}
    copies.close()


def test_a_write_waits_for_steps_that_still_use_the_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = wide_cache()
    copies = open_copies(cache, monkeypatch)
    for row in range(20):
        copies.rows.row(row)[:] = bytes([row + 1]) * copies.record_bytes
    for _ in range(2):  # the first time, kernels are compiled and pinned ids allocated
        torch.cuda._sleep(LONG)
        for block in range(20):  # an earlier step writes and reads the blocks
            fill(cache, block, 99)
        old = [pages[:, :20].clone() for pages in cache.planes()]
        pending = copies.write(list(range(20)), ids(list(range(20))))
    assert not pending.done()
    pending.wait()
    assert all((pages == 99).all() for pages in old)
    for block in range(20):
        assert all((pages[:, block] == block + 1).all() for pages in cache.planes())
    copies.close()


def test_a_write_that_fails_half_way_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = wide_cache()
    copies = open_copies(cache, monkeypatch)
    assert isinstance(copies, kv_copies.StreamedBlockCopies)
    for row in range(12):
        copies.rows.row(row)[:] = bytes([row + 1]) * copies.record_bytes
    for block in range(12):
        fill(cache, block, 99)
    move, calls = copies._move, 0

    def failing(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("no memory")
        move(*args)

    monkeypatch.setattr(copies, "_move", failing)
    torch.cuda._sleep(LONG)
    with pytest.raises(RuntimeError, match="no memory"):
        copies.write(list(range(12)), ids(list(range(12))))
    copies.wait()
    for block in range(12):  # two chunks of four were started: others may use the blocks now
        content = block + 1 if block < 8 else 99
        assert all((pages[:, block] == content).all() for pages in cache.planes())
    copies.close()


def captured_step(cache: KVCache, table: Tensor) -> torch.cuda.CUDAGraph:
    """A graph that adds 1 to every byte of the blocks in `table`, as steps write to their blocks."""
    planes = cache.planes()

    def step() -> None:
        for pages in planes:
            pages[:, table] += 1

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph


@pytest.mark.parametrize("seed", range(5))
def test_copies_beside_captured_steps(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block and row holds what a plain ledger says, and nothing more is allocated."""
    random = Random(seed)
    cache = wide_cache()
    copies = open_copies(cache, monkeypatch, chunk=random.randint(1, 8))
    table = torch.zeros(8, dtype=torch.int64, device="cuda")
    graph = captured_step(cache, table)
    for pages in cache.planes():
        pages.zero_()
    blocks = dict.fromkeys(range(40), 0)
    rows: dict[int, int] = {}
    writing: list[tuple] = []
    copies.read(ids([0]), [0]).wait()
    copies.write([0], ids([0])).wait()
    torch.cuda.synchronize()
    gc.collect()  # tensors of earlier tests
    allocated = torch.cuda.memory_allocated()
    for _ in range(200):
        if writing and random.random() < 0.4:
            pending, written = writing.pop(0)
            pending.wait()
            blocks |= written
        free = [block for block in blocks if not any(block in each[1] for each in writing)]
        action = random.choice(("step", "read", "write"))
        if action == "step":
            chosen = random.sample(free, 8)
            table.copy_(torch.tensor(chosen))
            graph.replay()
            for block in chosen:
                blocks[block] = (blocks[block] + 1) % 256
        elif action == "read":
            chosen = random.sample(free, random.randint(1, len(free)))
            used = random.sample(range(NUM_ROWS), len(chosen))
            for pending, _ in writing:  # a row that is being loaded may not be overwritten
                pending.wait()
            copies.read(ids(chosen), used)
            rows |= {row: blocks[block] for row, block in zip(used, chosen, strict=True)}
            torch.cuda._sleep(random.choice((0, 1_000_000)))
        elif rows:
            used = random.sample(sorted(rows), min(len(rows), len(free) - 8, 9))
            chosen = random.sample(free, max(0, len(used)))
            torch.cuda.synchronize()  # the rows were read
            written = {block: rows[row] for row, block in zip(used, chosen, strict=True)}
            writing.append((copies.write(used, ids(chosen)), written))
        if len(writing) > 2:
            pending, written = writing.pop(0)
            pending.wait()
            blocks |= written
    for pending, written in writing:
        pending.wait()
        blocks |= written
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == allocated
    for row, byte in rows.items():
        assert set(bytes(copies.rows.row(row))) == {byte}
    for block, byte in blocks.items():
        assert all((pages[:, block] == byte).all() for pages in cache.planes()), block
    copies.close()


def test_memory_is_pinned_during_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread pins pieces while graphs are captured and replayed; dropped rows are unpinned."""
    monkeypatch.setattr(host_rows, "_PIECE_BYTES", 2**20)
    for _ in range(3):  # the same addresses may come again
        cache = wide_cache()
        record_bytes = RecordLayout([cache]).record_bytes
        copies = make_block_copies([cache], 2000 * record_bytes)
        table = torch.arange(8, device="cuda")
        graphs = [captured_step(cache, table) for _ in range(5)]
        for graph in graphs:
            graph.replay()
        copies.rows.wait_ready()
        assert copies.rows.num_ready == copies.rows.num_rows
        assert all(tensor.is_pinned() for _, tensor in copies.rows.storages())
        copies.read(ids([3]), [1999]).wait()
        assert set(bytes(copies.rows.row(1999))) == {10}  # each capture runs a step, too
        del copies


def test_staging_is_counted() -> None:
    cache = wide_cache()
    before = torch.cuda.memory_allocated()
    copies = make_block_copies([cache], 2**20)
    on_device = [tensor for _, tensor in copies.storages() if tensor.is_cuda]
    num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in on_device)
    # The allocator rounds up.
    assert num_bytes <= torch.cuda.memory_allocated() - before <= num_bytes + 2**21
    copies.close()


def test_the_write_rate() -> None:
    copies = make_block_copies([wide_cache(2000)], 2**28)
    assert measure_write_rate(copies) > 1e9
    copies.close()
