"""The runner's tiers with stores that are slow, full, wrong or broken: records arrive whole, or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from threading import Event, Thread

import pytest
import torch

from windlass.core.types import BlockId, StepPlan
from windlass.kernels.batch import KVCache, attention_layout
from windlass.runner.kv_copies import make_block_copies
from windlass.runner.kv_records import RecordLayout
from windlass.runner.kv_tiers import KVTiers
from windlass.tiers.store import StoreStats

NUM_BLOCKS = 16


class FakeStore:
    """A store in a dictionary. `go` holds back its threads."""

    name = "disk"

    def __init__(self) -> None:
        self.records: dict[bytes, bytes] = {}
        self.go = Event()
        self.go.set()
        self.error: Exception | None = None
        self.closed = False

    def contains(self, key: bytes) -> bool:
        return key in self.records

    def get(self, key: bytes, out: memoryview) -> bool:
        self.go.wait()
        if self.error is not None:
            raise self.error
        record = self.records.get(key, b"")
        if not record:
            return False
        out[:] = record
        return True

    def put(self, key: bytes, record: memoryview) -> bool:
        self.go.wait()
        if self.error is not None:
            raise self.error
        self.records[key] = bytes(record)
        return True

    def stats(self) -> StoreStats:
        return StoreStats(num_records=len(self.records), writes=len(self.records))

    def close(self) -> None:
        self.closed = True


class Device:
    """A KV cache whose block n holds the number n + 1, and its tiers."""

    def __init__(
        self,
        num_rows: int,
        stores: Sequence[FakeStore] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        layout = attention_layout([None], num_kv_heads=1, dim=8, block_size=4, dtype=torch.float32)
        self.cache = KVCache(layout, NUM_BLOCKS, torch.float32, torch.device("cpu"))
        for block in range(NUM_BLOCKS):
            self.fill(block, block + 1)
        num_bytes = num_rows * RecordLayout([self.cache]).record_bytes
        self.copies = make_block_copies([self.cache], num_bytes)
        self.tiers = KVTiers(self.copies, stores, clock=clock)

    def fill(self, block: int, value: float) -> None:
        for pages in self.cache.planes():
            pages[:, block].view(torch.float32).fill_(value)

    def content(self, block: int) -> set[float]:
        return {
            value
            for pages in self.cache.planes()
            for value in pages[:, block].view(torch.float32).unique().tolist()
        }

    def save(self, *blocks: int) -> None:
        self.tiers.apply(StepPlan([], saves=[(BlockId(n), b"%d" % n) for n in blocks]))
        for block in blocks:
            self.fill(block, -1.0)  # by the step that follows at once

    def load(self, *pairs: tuple[int, int]) -> dict[bytes, bool]:
        """Load the records of blocks into other blocks, and wait."""
        self.tiers.apply(StepPlan([], loads=[(b"%d" % n, BlockId(to)) for n, to in pairs]))
        return self.wait(len(pairs))

    def wait(self, count: int) -> dict[bytes, bool]:
        found: dict[bytes, bool] = {}
        while len(found) < count:
            found |= self.tiers.poll()
            time.sleep(0)
        return found


@pytest.fixture
def store() -> Iterator[FakeStore]:
    made = FakeStore()
    yield made
    made.go.set()


def test_a_block_comes_back_from_the_host() -> None:
    device = Device(num_rows=4)
    device.save(1, 2)
    assert device.tiers.is_saving
    assert device.load((1, 8), (2, 9), (5, 10)) == {b"1": True, b"2": True, b"5": False}
    assert (device.content(8), device.content(9)) == ({2.0}, {3.0})
    (stats,) = device.tiers.stats()
    assert (stats.num_records, stats.num_saves, stats.num_loads, stats.num_failures) == (2, 2, 2, 1)
    device.tiers.close()


def test_saves_of_a_plan_evict_no_record_that_it_loads() -> None:
    device = Device(num_rows=2)
    device.save(1, 2)
    device.tiers.poll()
    saves, loads = [(BlockId(3), b"3")], [(b"1", BlockId(8)), (b"2", BlockId(3))]
    device.tiers.apply(StepPlan([], saves=saves, loads=loads))
    assert device.wait(2) == {b"1": True, b"2": True}
    assert (device.content(8), device.content(3)) == ({2.0}, {3.0})
    device.tiers.close()


def test_the_first_blocks_of_a_prefix_are_evicted_last() -> None:
    device = Device(num_rows=3)
    device.save(3, 2, 1)
    assert all(device.load((1, 8), (2, 9), (3, 10)).values())
    device.save(4)
    device.tiers.poll()
    assert [device.tiers.find(b"%d" % n) for n in (1, 2, 3, 4)] == [0, 0, None, 0]
    device.tiers.close()


def test_what_the_device_has_is_evicted_first() -> None:
    device = Device(num_rows=3)
    device.save(1, 2, 3)
    assert all(device.load((2, 8), (3, 9)).values())
    device.save(2)  # the device evicts it
    device.save(4)
    device.tiers.poll()
    assert [device.tiers.find(b"%d" % n) for n in (1, 2, 3, 4)] == [0, 0, None, 0]
    device.save(5)
    device.tiers.poll()
    assert [device.tiers.find(b"%d" % n) for n in (1, 2, 4, 5)] == [None, 0, 0, 0]
    assert device.tiers.stats()[0].num_saves == 5  # 2 was copied once
    device.tiers.close()


def test_full_rows_refuse_saves() -> None:
    device = Device(num_rows=2)
    device.save(1, 2, 3)
    device.tiers.poll()
    assert [device.tiers.find(b"%d" % n) for n in (1, 2, 3)] == [0, 0, None]
    assert device.tiers.stats()[0].num_refused == 1
    device.tiers.close()


def test_saves_are_written_behind_and_found_by_another_engine(store: FakeStore) -> None:
    device = Device(num_rows=4, stores=[store])
    store.go.clear()
    device.save(1, 2)
    device.tiers.poll()  # does not wait for the store
    assert device.tiers.find(b"1") == 0
    store.go.set()
    device.tiers.close()
    assert store.closed
    other = Device(num_rows=4, stores=[store])
    assert other.tiers.find(b"1") == 1
    assert other.load((1, 8)) == {b"1": True}
    assert other.content(8) == {2.0}
    assert other.tiers.find(b"1") == 0  # the row keeps it
    assert other.tiers.record_s(1) > other.tiers.record_s(0)
    other.tiers.close()


def test_more_records_than_rows_are_loaded_one_after_the_other(store: FakeStore) -> None:
    device = Device(num_rows=8, stores=[store])
    device.save(*range(8))
    device.tiers.close()
    small = Device(num_rows=2, stores=[store])
    assert all(small.load(*((n, 8 + n) for n in range(8))).values())
    assert [small.content(8 + n) for n in range(8)] == [{n + 1.0} for n in range(8)]
    small.tiers.close()


def test_a_store_that_fails_is_a_miss(store: FakeStore) -> None:
    store.records[b"1"] = b""  # damaged
    device = Device(num_rows=4, stores=[store])
    assert device.load((1, 8)) == {b"1": False}
    store.records[b"2"] = bytes(RecordLayout([device.cache]).record_bytes)
    store.error = OSError("the disk is gone")
    assert device.load((2, 9)) == {b"2": False}
    device.save(3)
    device.tiers.poll()
    assert device.load((3, 10)) == {b"3": True}  # from the host
    assert device.tiers.stats()[1].num_failures == 2
    device.tiers.close()


def test_a_slow_store_gets_no_more_records_than_its_queue_holds(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windlass.runner.tier_threads._MAX_WRITES", 2)
    device = Device(num_rows=8, stores=[store])
    store.go.clear()
    device.save(0, 1, 2, 3)
    device.tiers.poll()
    assert device.tiers.stats()[1].num_refused == 2
    store.go.set()
    device.tiers.close()
    assert len(store.records) == 2


def test_loads_fail_while_writes_hold_all_rows(store: FakeStore) -> None:
    store.records[b"9"] = bytes(RecordLayout([Device(1).cache]).record_bytes)
    device = Device(num_rows=2, stores=[store])
    store.go.clear()
    device.save(0, 1)
    device.tiers.poll()
    assert device.load((9, 8)) == {b"9": False}
    store.go.set()
    device.tiers.close()


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[Device, str], None]:
    """Makes the next copy of a device fail, after it has done a part of its work."""

    def break_next(device: Device, name: str) -> None:
        copy = getattr(device.copies, name)

        def fail(*args: list[int]) -> None:
            monkeypatch.undo()
            copy(*(each[:1] for each in args))
            raise MemoryError("no memory for the ids of blocks")

        monkeypatch.setattr(device.copies, name, fail)

    return break_next


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_copy_to_the_device_that_fails_is_a_miss(
    store: FakeStore, broken: Callable[[Device, str], None], is_stored: bool
) -> None:
    """Its loads end, since requests wait for them, and others get its rows."""
    device = Device(num_rows=2, stores=[store] if is_stored else [])
    device.save(1, 2)
    device.tiers.close()
    if is_stored:
        device = Device(num_rows=2, stores=[store])
    broken(device, "write")
    # Both copies, where records of a store do not arrive together, or the first one.
    found = device.load((1, 8), (2, 9))
    assert not all(found.values())
    assert device.tiers.stats()[is_stored].num_failures == list(found.values()).count(False)
    assert device.load((1, 8), (2, 9)) == {b"1": True, b"2": True}
    assert (device.content(8), device.content(9)) == ({2.0}, {3.0})
    device.save(3, 4)
    assert device.load((3, 8), (4, 9)) == {b"3": True, b"4": True}
    device.tiers.close()


def test_a_copy_to_the_host_that_fails_stores_nothing(
    broken: Callable[[Device, str], None],
) -> None:
    device = Device(num_rows=2)
    broken(device, "read")
    device.save(1, 2)
    assert not device.tiers.is_saving
    assert device.tiers.stats()[0].num_refused == 2
    assert device.load((1, 8)) == {b"1": False}
    device.save(3, 4)
    assert device.load((3, 8), (4, 9)) == {b"3": True, b"4": True}
    device.tiers.close()


def test_a_store_that_does_not_answer_is_a_miss_and_is_used_again_when_it_does(
    store: FakeStore,
) -> None:
    now = 0.0
    first = Device(num_rows=8, stores=[store])
    first.save(*range(8))
    first.tiers.close()
    device = Device(num_rows=3, stores=[store], clock=lambda: now)
    store.go.clear()
    pairs = [(n, 8 + n) for n in range(4)]  # more than there are rows
    device.tiers.apply(StepPlan([], loads=[(b"%d" % n, BlockId(to)) for n, to in pairs]))
    now = 9.0
    assert device.tiers.poll() == []
    now = 10.0
    assert device.wait(4) == {b"%d" % n: False for n in range(4)}
    assert device.tiers.find(b"1") is None  # no further request waits for it
    assert device.tiers.stats()[1].num_failures == 4
    store.go.set()
    while device.tiers.find(b"7") is None:
        device.tiers.poll()
    # The records that came too late are those of the host, and no block was written.
    assert sorted(n for n in range(4) if device.tiers.find(b"%d" % n) == 0) == [1, 2, 3]
    assert [device.content(to) for _, to in pairs] == [{float(to + 1)} for _, to in pairs]
    assert device.load((0, 8), (1, 9)) == {b"0": True, b"1": True}
    assert (device.content(8), device.content(9)) == ({1.0}, {2.0})
    device.tiers.close()


def test_loads_go_on_where_the_system_starts_no_more_threads(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each record is read once: a second read would fill a row that is another record's by then."""
    first = Device(num_rows=4, stores=[store])
    first.save(0, 1)
    first.tiers.close()
    device = Device(num_rows=2, stores=[store])
    reads: list[bytes] = []
    go, get = Event(), store.get

    def slow(key: bytes, out: memoryview) -> bool:
        reads.append(key)
        return (key != b"0" or go.wait()) and get(key, out)

    def start(_thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(store, "get", slow)
    device.tiers.apply(StepPlan([], loads=[(b"0", BlockId(8))]))
    while not reads:
        time.sleep(0)
    monkeypatch.setattr(Thread, "start", start)
    assert device.load((1, 9)) == {b"1": True}  # by another thread
    go.set()
    assert device.wait(1) == {b"0": True}
    device.tiers.close()
    assert reads == [b"0", b"1"]
    assert (device.content(8), device.content(9)) == ({1.0}, {2.0})
