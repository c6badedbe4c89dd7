"""The order of copies on a GPU's streams, without a GPU, and the pinning of rows."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from random import Random
from threading import Event

import pytest
import torch
from torch import Tensor

from tests.runner.fake_streams import FakeDevice
from tests.runner.kv_copy_cases import LAYOUTS, NUM_BLOCKS, make_cache, snapshot
from windlass.core.types import BlockId
from windlass.errors import EngineError
from windlass.kernels.batch import KVCache
from windlass.runner import host_rows
from windlass.runner.cuda import kv_copies
from windlass.runner.cuda.kv_copies import CopyKernels, StreamedBlockCopies, staging_bytes
from windlass.runner.host_rows import HostRows
from windlass.runner.kv_records import PendingCopy, RecordLayout

NUM_ROWS = 30


def open_copies(
    cache: KVCache, device: FakeDevice, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> StreamedBlockCopies:
    """Copies with staging for `chunk` blocks at a time."""
    layout = RecordLayout([cache])
    monkeypatch.setattr(kv_copies, "_CHUNK_BYTES", chunk * layout.record_bytes)
    rows = HostRows(NUM_ROWS, layout.record_bytes)
    return StreamedBlockCopies(layout, rows, device.streams, CopyKernels())


class World:
    """Random steps, reads and writes. Knows what every block and row must hold."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = Random(seed)
        self.cache = make_cache("fp8 with scales")
        self.device = FakeDevice(seed)
        self.copies = open_copies(self.cache, self.device, monkeypatch, self.random.randint(1, 4))
        self.blocks = {block: self.bytes_of(block) for block in range(NUM_BLOCKS)}
        self.rows: dict[int, bytes] = {}
        self.in_flight: list[tuple[PendingCopy, dict[int, bytes], list[int], list[int]]] = []

    def bytes_of(self, block: int) -> bytes:
        return b"".join(bytes(pages[:, block].flatten().numpy()) for pages in self.cache.planes())

    def free(self, count: int, busy: int) -> list[int]:
        """Ids of blocks (`busy` 3) or rows (`busy` 2) that no copy uses."""
        taken = {each for copy in self.in_flight for each in copy[busy]}
        total = NUM_BLOCKS if busy == 3 else NUM_ROWS
        ids = [each for each in range(total) if each not in taken]
        return self.random.sample(ids, min(count, len(ids)))

    def step(self) -> None:
        """A step overwrites some blocks, as late as the streams allow."""
        blocks = self.free(self.random.randint(0, NUM_BLOCKS), 3)
        fill = self.random.randbytes(len(blocks))

        def work() -> None:
            for pages in self.cache.planes():
                for block, byte in zip(blocks, fill, strict=True):
                    pages[:, block] = byte

        self.device.compute.run(work)
        for block, byte in zip(blocks, fill, strict=True):
            self.blocks[block] = bytes([byte]) * self.copies.record_bytes

    def read(self) -> None:
        blocks = self.free(self.random.randint(1, NUM_BLOCKS), 3)
        rows = self.free(len(blocks), 2)
        blocks = blocks[: len(rows)]
        pending = self.copies.read([BlockId(block) for block in blocks], rows)
        expected = {row: self.blocks[block] for block, row in zip(blocks, rows, strict=True)}
        for row in rows:
            self.rows.pop(row, None)
        self.in_flight.append((pending, expected, rows, []))

    def write(self) -> None:
        free = {row for row in self.free(NUM_ROWS, 2) if row in self.rows}
        rows = self.random.sample(sorted(free), min(len(free), self.random.randint(1, 6)))
        blocks = self.free(len(rows), 3)
        rows = rows[: len(blocks)]
        pending = self.copies.write(rows, [BlockId(block) for block in blocks])
        for row, block in zip(rows, blocks, strict=True):
            self.blocks[block] = self.rows[row]
        self.in_flight.append((pending, {}, rows, blocks))

    def collect(self) -> None:
        for copy in list(self.in_flight):
            pending, expected, _, blocks = copy
            if self.random.random() < 0.1:
                pending.wait()
            if pending.done():
                self.in_flight.remove(copy)
                for row, record in expected.items():
                    assert bytes(self.copies.rows.row(row)) == record
                    self.rows[row] = record
                for block in blocks:
                    assert self.bytes_of(block) == self.blocks[block]

    def run(self, num_steps: int = 40) -> None:
        for _ in range(num_steps):
            self.random.choice((self.step, self.read, self.write))()
            self.collect()
            for _ in range(self.random.randint(0, 4)):
                self.device.advance()
        self.device.finish()
        for block, record in self.blocks.items():
            assert self.bytes_of(block) == record


@pytest.mark.parametrize("seed", range(40))
def test_steps_overwrite_blocks_while_copies_are_in_flight(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    World(seed, monkeypatch).run()


@pytest.mark.parametrize("stream", ["compute", "reads", "writes"])
def test_every_wait_is_needed(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the waits of one stream, some order of work breaks the copies."""

    def fails(seed: int) -> bool:
        world = World(seed, monkeypatch)
        monkeypatch.setattr(getattr(world.device, stream), "wait", lambda _: None)
        try:
            world.run()
        except AssertionError:
            return True
        return False

    assert any(fails(seed) for seed in range(40))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_round_trip(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, device = make_cache(name), FakeDevice(0)
    copies = open_copies(cache, device, monkeypatch, chunk)
    before = snapshot(cache)
    blocks = [BlockId(block) for block in reversed(range(NUM_BLOCKS))]
    rows = [*range(12, 17), *range(3, 9)]  # two runs
    pending = copies.read(blocks, rows)
    assert not pending.done()
    pending.wait()
    for pages in cache.planes():
        pages.zero_()
    copies.write(rows[:-1], blocks[:-1]).wait()
    for was, now in zip(before, snapshot(cache), strict=True):
        assert torch.equal(now[:, 1:], was[:, 1:])
        assert not now[:, 0].any()
    assert copies.read([], []).done()
    assert copies.write([], []).done()
    copies.close()


def test_rows_side_by_side_are_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order of the blocks: evicted blocks come tail first, loaded ones head first."""
    device = FakeDevice(0)
    copies = open_copies(make_cache("bf16"), device, monkeypatch, 100)
    runs = HostRows.runs
    num_runs = []

    def counted(rows: HostRows, chosen: Sequence[int]) -> Iterator[Tensor]:
        found = list(runs(rows, chosen))
        num_runs.append(len(found))
        return iter(found)

    monkeypatch.setattr(HostRows, "runs", counted)
    blocks = [BlockId(block) for block in (7, 2, 9, 0)]
    copies.read(blocks, [8, 6, 7, 5]).wait()
    copies.write([6, 5, 8, 7], blocks).wait()
    assert num_runs == [1, 1]


def test_bad_copies_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = open_copies(make_cache("bf16"), FakeDevice(0), monkeypatch, 4)
    with pytest.raises(EngineError, match="blocks twice"):
        copies.read([BlockId(1), BlockId(1)], [0, 1])
    with pytest.raises(EngineError, match="rows twice"):
        copies.write([1, 1], [BlockId(0), BlockId(1)])


def test_staging_is_bounded_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = open_copies(make_cache("bf16"), FakeDevice(0), monkeypatch, 3)
    staging, *rows = [tensor.untyped_storage().nbytes() for _, tensor in copies.storages()]
    assert staging == staging_bytes(copies.record_bytes) == 9 * 3 * copies.record_bytes
    assert sum(rows) == NUM_ROWS * copies.record_bytes
    # No more than the cache has.
    copies = open_copies(make_cache("bf16"), FakeDevice(0), monkeypatch, 100)
    staging = next(tensor.untyped_storage().nbytes() for _, tensor in copies.storages())
    assert staging == 9 * NUM_BLOCKS * copies.record_bytes


class FakePinning:
    """Pins up to `limit` pieces; waits for `go` before each one after the first."""

    def __init__(self, limit: int = 100) -> None:
        self.limit = limit
        self.go = Event()
        self.pinned: list[int] = []
        self.num_unpinned = 0

    def pin(self, memory: Tensor) -> None:
        if self.pinned:
            self.go.wait()
        if len(self.pinned) == self.limit:
            raise EngineError("no more memory can be pinned.")
        assert not memory.any()
        self.pinned.append(memory.data_ptr())

    def unpin(self, memory: Tensor) -> None:
        self.pinned.remove(memory.data_ptr())
        self.num_unpinned += 1


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_rows, "_PIECE_BYTES", 1000)


@pytest.mark.usefixtures("small_pieces")
def test_rows_become_ready_piece_by_piece() -> None:
    pinning = FakePinning()
    rows = HostRows(10, 300, pinning=pinning)
    assert rows.num_ready == 3
    pinning.go.set()
    rows.wait_ready()
    assert rows.num_ready == 10
    assert len(pinning.pinned) == 4
    rows.close()
    assert (pinning.pinned, pinning.num_unpinned) == ([], 4)
    rows.close()


@pytest.mark.usefixtures("small_pieces")
def test_rows_are_unpinned_when_they_are_dropped() -> None:
    pinning = FakePinning()
    pinning.go.set()
    rows = HostRows(10, 300, pinning=pinning)
    rows.wait_ready()
    del rows
    gc.collect()
    assert (pinning.pinned, pinning.num_unpinned) == ([], 4)


@pytest.mark.usefixtures("small_pieces")
def test_memory_that_cannot_be_pinned_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    pinning = FakePinning(limit=2)
    pinning.go.set()
    with caplog.at_level(logging.WARNING, "windlass.engine"):
        rows = HostRows(10, 300, pinning=pinning)
        rows.wait_ready()
    assert rows.num_ready == 6
    assert "--kv-offload-gb: only 1.8 KiB of host memory are used: no more" in caplog.text
    with pytest.raises(EngineError, match="no more memory"):
        HostRows(10, 300, pinning=FakePinning(limit=0))


@pytest.mark.usefixtures("small_pieces")
def test_runs_are_rows_side_by_side_in_one_piece() -> None:
    rows = HostRows(10, 300)
    found = [len(run) for run in rows.runs([0, 1, 2, 3, 5, 4, 7, 8, 9])]
    assert found == [3, 1, 1, 1, 2, 1]
    assert list(rows.runs([])) == []
