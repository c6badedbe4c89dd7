"""The host tier: records in rows of host memory, least recently used evicted first.

A record that was loaded is evicted before all others, until the device evicts its block: what both have
would take the room of what only the host has. Rows are copied from and to the device directly (runner/kv_copies.py). A record appears in the store
when its row is committed; a row that a copy reads or writes is pinned, and stays.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Protocol

from windlass.tiers.store import StoreStats


class RowMemory(Protocol):
    """Host memory in rows of one record; runner/host_rows.py."""

    num_rows: int
    row_bytes: int

    @property
    def num_ready(self) -> int:
        """The first rows that can be used; the others become usable later."""
        ...

    def row(self, index: int) -> memoryview: ...


class HostStore:
    """Owns the content of every row. Rows are free, reserved (being filled), or hold a record."""

    name = "host"

    def __init__(self, rows: RowMemory) -> None:
        self.rows = rows
        self._lock = Lock()
        self._num_used = 0  # rows that were ever reserved
        self._free: list[int] = []  # of these
        self._records: OrderedDict[bytes, int] = OrderedDict()  # key -> row, the oldest use first
        self._pins: dict[int, int] = {}  # of committed rows
        self._hits = self._misses = self._writes = self._refused = self._evictions = 0

    def contains(self, key: bytes) -> bool:
        return key in self._records

    def use(self, key: bytes) -> bool:
        """Make a record the most recently used. False: there is no such record."""
        with self._lock:
            if key not in self._records:
                return False
            self._records.move_to_end(key)
            return True

    def evict_first(self, key: bytes) -> None:
        """Evict a record before all others, unless it is used again."""
        with self._lock:
            if key in self._records:
                self._records.move_to_end(key, last=False)

    def reserve(self) -> int | None:
        """A row to fill, until `commit` or `free`; evicts the oldest record. None: all are in use."""
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._num_used < self.rows.num_ready:
                self._num_used += 1
                return self._num_used - 1
            key = next((key for key, row in self._records.items() if row not in self._pins), None)
            if key is None:
                return None
            self._evictions += 1
            return self._records.pop(key)

    def commit(self, row: int, key: bytes) -> None:
        """Make a reserved row, which is filled, the record of a key."""
        with self._lock:
            if key in self._records:  # stored meanwhile: the same bytes
                self._records.move_to_end(key)
                self._free.append(row)
                return
            self._records[key] = row
            self._writes += 1

    def free(self, row: int) -> None:
        """Give back a reserved row that was not filled."""
        with self._lock:
            self._free.append(row)

    def pin(self, key: bytes) -> int | None:
        """The row of a record, which stays until `unpin`. None: there is no such record."""
        with self._lock:
            row = self._records.get(key)
            if row is None:
                self._misses += 1
                return None
            self._hits += 1
            self._records.move_to_end(key)
            self._pins[row] = self._pins.get(row, 0) + 1
            return row

    def unpin(self, row: int) -> None:
        with self._lock:
            self._pins[row] -= 1
            if not self._pins[row]:
                del self._pins[row]

    def get(self, key: bytes, out: memoryview) -> bool:
        row = self.pin(key)
        if row is None:
            return False
        out[:] = self.rows.row(row)
        self.unpin(row)
        return True

    def put(self, key: bytes, record: memoryview) -> bool:
        if self.contains(key):
            return True
        row = self.reserve()
        if row is None:
            self._refused += 1
            return False
        self.rows.row(row)[:] = record
        self.commit(row, key)
        return True

    def clear(self) -> int:
        """Drop all records that no copy uses; returns their number."""
        with self._lock:
            dropped = [key for key, row in self._records.items() if row not in self._pins]
            self._free += [self._records.pop(key) for key in dropped]
            return len(dropped)

    def stats(self) -> StoreStats:
        with self._lock:
            num_records = len(self._records)
            return StoreStats(
                num_records=num_records,
                num_bytes=num_records * self.rows.row_bytes,
                max_bytes=self.rows.num_rows * self.rows.row_bytes,
                hits=self._hits,
                misses=self._misses,
                writes=self._writes,
                refused=self._refused,
                evictions=self._evictions,
            )

    def close(self) -> None:
        with self._lock:
            self._records.clear()
