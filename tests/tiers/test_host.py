"""The host tier: rows, eviction order, pins."""

from __future__ import annotations

from random import Random
from threading import Thread

from windlass.tiers.host import HostStore
from windlass.tiers.store import BlockStore


class Rows:
    """Rows of plain memory."""

    def __init__(self, num_rows: int, row_bytes: int = 4) -> None:
        self.num_rows = self.num_ready = num_rows
        self.row_bytes = row_bytes
        self._memory = memoryview(bytearray(num_rows * row_bytes))

    def row(self, index: int) -> memoryview:
        return self._memory[index * self.row_bytes : (index + 1) * self.row_bytes]


def record(text: str) -> memoryview:
    return memoryview(text.encode())


def get(store: BlockStore, key: bytes) -> str | None:
    out = memoryview(bytearray(4))
    return bytes(out).decode() if store.get(key, out) else None


def test_the_least_recently_used_record_is_evicted() -> None:
    store = HostStore(Rows(2))
    assert store.put(b"a", record("aaaa"))
    assert store.put(b"b", record("bbbb"))
    assert get(store, b"a") == "aaaa"
    assert store.put(b"c", record("cccc"))
    assert (get(store, b"a"), get(store, b"b"), get(store, b"c")) == ("aaaa", None, "cccc")
    stats = store.stats()
    assert (stats.num_records, stats.num_bytes, stats.max_bytes) == (2, 8, 8)
    assert (stats.hits, stats.misses, stats.writes, stats.evictions) == (3, 1, 3, 1)


def test_pinned_and_reserved_rows_stay() -> None:
    store = HostStore(Rows(2))
    store.put(b"a", record("aaaa"))
    row = store.pin(b"a")
    reserved = store.reserve()
    assert row is not None
    assert reserved is not None
    assert not store.put(b"b", record("bbbb"))
    assert store.stats().refused == 1
    store.unpin(row)
    assert store.put(b"b", record("bbbb"))  # in place of a
    assert not store.contains(b"a")
    store.commit(reserved, b"b")  # is there already: the row is free again
    assert store.reserve() == reserved


def test_rows_that_are_not_ready_are_not_used() -> None:
    rows = Rows(2)
    rows.num_ready = 0
    store = HostStore(rows)
    assert store.reserve() is None
    rows.num_ready = 1
    assert store.reserve() == 0
    assert store.reserve() is None


def test_clear_keeps_pinned_records() -> None:
    store = HostStore(Rows(3))
    store.put(b"a", record("aaaa"))
    store.put(b"b", record("bbbb"))
    assert store.pin(b"a") is not None
    assert store.clear() == 1
    assert store.contains(b"a")
    assert not store.contains(b"b")


def test_threads_never_read_a_mixed_record() -> None:
    store = HostStore(Rows(4, 4096))
    wrong: list[bytes] = []

    def work(seed: int) -> None:
        random, out = Random(seed), memoryview(bytearray(4096))
        for _ in range(300):
            key = bytes([random.randrange(8)])
            if random.random() < 0.5:
                store.put(key, memoryview(key * 4096))
            elif store.get(key, out) and bytes(out) != key * 4096:
                wrong.append(key)

    threads = [Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
