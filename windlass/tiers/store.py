"""The protocol of a KV tier's store: the records of sealed blocks, found by their keys.

A key is that of a sealed block in the prefix cache (core/blocks.py:group_key), which covers the salt.
A record is the bytes of that block on one rank. The runner decides which records are stored and
loaded; core decides for whom.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """A snapshot of one store: its content, and counters since it was opened."""

    num_records: int = 0
    num_bytes: int = 0
    max_bytes: int = 0
    hits: int = 0  # records that `get` returned
    misses: int = 0  # calls of `get` that found none
    writes: int = 0  # records that were stored
    refused: int = 0  # records that were not stored: no room, or an error
    corrupt: int = 0  # records that were found damaged, or written by another model
    evictions: int = 0


class BlockStore(Protocol):
    """Stores records of equal size. Thread-safe.

    `get` and `put` may block for I/O: tier threads call them, never a step.
    """

    name: str  # of the tier: "host", "disk", "peer"

    def contains(self, key: bytes) -> bool:
        """Whether a record is stored, as far as an index in memory knows."""
        ...

    def get(self, key: bytes, out: memoryview) -> bool:
        """Copy a record into `out`. False: it is missing, damaged or foreign, and `out` is undefined."""
        ...

    def put(self, key: bytes, record: memoryview) -> bool:
        """Store a record, or refresh its age. False: there is no room, or an error that is counted."""
        ...

    def stats(self) -> StoreStats: ...

    def close(self) -> None:
        """Finish writes and free everything. No other call may follow."""
        ...
