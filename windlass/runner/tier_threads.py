"""Tiers with their measured speed, and the threads that read and write slow tiers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import BoundedSemaphore, Event
from time import perf_counter
from typing import NamedTuple

from windlass.core.types import BlockId
from windlass.tiers.peer import PeerExport, PeerStore
from windlass.tiers.store import BlockStore

_log = logging.getLogger("windlass.tiers")

NUM_READERS = 4
_MAX_WRITES = 512  # records that wait to be written to one store; more are refused
_RECENT = 0.2  # weight of the last measurement
_STUCK_S = 10.0  # without a completed read for this long, a store counts as down


class Record(NamedTuple):
    """A record that is loaded."""

    key: bytes
    row: int
    block: BlockId
    tier: int
    ok: bool = True
    seconds: float = 0.0  # that the store took


@dataclass(slots=True)
class Tier:
    """A store with its counters and measured speed. Changed only by the thread that submits steps."""

    store: BlockStore
    record_s: float = 0.0  # seconds to load one record; 0: not measured yet
    num_loads: int = 0
    num_failures: int = 0
    num_refused: int = 0
    measured_at: float = field(default_factory=perf_counter)

    def measure(self, seconds: float) -> None:
        """Update the rate with the seconds that one record took."""
        self.record_s += (_RECENT if self.record_s else 1.0) * (seconds - self.record_s)
        self.measured_at = perf_counter()


class SlowTier(Tier):
    """A store that threads read and write."""

    def __init__(self, store: BlockStore) -> None:
        super().__init__(store)
        self.readers = _threads(NUM_READERS, f"windlass-{store.name}-read")
        self.writer = _threads(1, f"windlass-{store.name}-write")
        self.room = BoundedSemaphore(_MAX_WRITES)  # for further writes
        self.reads: dict[int, Record] = {}  # in progress, by row
        self.late: set[int] = set()  # rows of reads that nothing waits for any more
        self.answered_at = 0.0  # the end of the last read, or the start of the first one

    def lacks(self, key: bytes) -> bool:
        """Whether the store would take a record."""
        return not self.store.contains(key)

    def read(self, record: Record, work: Callable[[], None], now: float) -> None:
        """Start a read, and note that it is in progress."""
        if not self.reads:
            self.answered_at = now
        self.reads[record.row] = record
        submit(self.readers, work)

    def ended(self, record: Record, now: float) -> bool:
        """Note the end of a read. Returns whether a load still waits for it."""
        self.answered_at = now
        if record.row not in self.late:
            del self.reads[record.row]
            return True
        self.late.discard(record.row)
        if not self.late:
            _log.warning("the %s tier answers again.", self.store.name)
        return False

    def give_up(self, now: float) -> list[Record]:
        """Stop waiting for reads if the store does not answer. Returns these reads."""
        if not self.reads or now - self.answered_at < _STUCK_S:
            return []
        found = list(self.reads.values())
        _log.warning(
            "the %s tier has read no KV block for %.0f s: %d blocks are computed instead, and it is "
            "not used until it answers.",
            self.store.name,
            _STUCK_S,
            len(found),
        )
        self.reads.clear()
        self.late.update(record.row for record in found)
        return found

    def close(self) -> None:
        self.readers.shutdown(cancel_futures=True)
        self.writer.shutdown()
        self.store.close()


class PeerTier(SlowTier):
    """A store that passes records to another engine: it takes the records that engine needs."""

    def __init__(self, store: PeerExport | PeerStore) -> None:
        super().__init__(store)
        self._peer = store

    def lacks(self, key: bytes) -> bool:
        return self._peer.wants(key) and not self._peer.contains(key)


def _threads(count: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads are started now: ThreadPoolExecutor starts them in `submit`, where it can fail."""
    threads, go = ThreadPoolExecutor(count, name), Event()
    try:
        for _ in range(count):
            threads.submit(go.wait)
    finally:
        go.set()
    return threads


def submit(threads: ThreadPoolExecutor, work: Callable[[], None]) -> None:
    try:
        threads.submit(work)
    except RuntimeError:  # the process is exiting, and its threads have ended
        work()
