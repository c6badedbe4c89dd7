"""The peer tier: records that one engine hands to another through a ring of memory.

A prefill engine appends the blocks of its prompts; decode engines read them, by their number, from the
same memory (engines of one server) or over TCP (peer_link.py, servers on different hosts). A record that was overwritten, or that its
writer did not finish, is a miss: a number, the key and a checksum stand before every record.

    ring    magic, sizes, fingerprint | slot 0 | slot 1 | ...
    slot    sequence, checksum, key | record        sequence 0: empty, or being written
"""

from __future__ import annotations

import logging
import math
import struct
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from mmap import mmap
from threading import Lock
from typing import Literal, Protocol

from windlass.core.handover import HandedBlocks, PeerRecord
from windlass.errors import ConfigError
from windlass.tiers.store import StoreStats

_log = logging.getLogger("windlass.tiers")

MAX_KEY_BYTES = 32
FINGERPRINT_BYTES = 16
_MAGIC = b"WINDLRG1"
_HEADER = struct.Struct(f"<8sQQ{FINGERPRINT_BYTES}s")
_SLOT = struct.Struct(f"<QIH{MAX_KEY_BYTES}s")
_SEQUENCE = struct.Struct("<Q")
_LINE = 64  # bytes: headers and slots begin at multiples
_MIN_SLOTS = 4
_MAX_ANNOUNCED = 262_144  # records; the oldest are forgotten


# "lost": the engine that has the record is out of reach.
ReadResult = Literal["read", "missing", "corrupt", "lost"]


class RecordRing:
    """Records in memory that several processes share. One process writes, in any number of threads."""

    def __init__(self, memory: mmap | bytearray) -> None:
        self._memory = memoryview(memory)

    def format(self, record_bytes: int, fingerprint: bytes) -> int:
        """Take over the ring as its writer; returns the number of slots.

        Records of a writer before stay until they are overwritten: their keys and checksums are right.
        """
        stride = _stride(record_bytes)
        num_slots = (len(self._memory) - _LINE) // stride
        if num_slots < _MIN_SLOTS:
            need = _LINE + _MIN_SLOTS * stride
            raise ConfigError(
                f"--kv-transfer-gb {len(self._memory) / 2**30:g} has room for {max(0, num_slots)} KV "
                f"blocks of {record_bytes:,} bytes, and at least {_MIN_SLOTS} are needed: "
                f"{need / 2**30:.3g} GiB."
            )
        _HEADER.pack_into(self._memory, 0, _MAGIC, record_bytes, num_slots, fingerprint)
        return num_slots

    @property
    def record_bytes(self) -> int:
        """Bytes of a record; 0: the ring has no writer yet."""
        magic, record_bytes, _, _ = _HEADER.unpack_from(self._memory)
        return int(record_bytes) if magic == _MAGIC else 0

    def write(self, sequence: int, key: bytes, record: memoryview) -> None:
        """Write a record, numbered from 1. The number appears last."""
        start = self._start(sequence, record.nbytes)
        begin = start + _SLOT.size
        memory = self._memory
        _SEQUENCE.pack_into(memory, start, 0)
        memory[begin : begin + record.nbytes] = record
        checksum = zlib.crc32(record, zlib.crc32(key))
        _SLOT.pack_into(memory, start, 0, checksum, len(key), key)
        _SEQUENCE.pack_into(memory, start, sequence)

    def read(self, wanted: PeerRecord, out: memoryview, fingerprint: bytes) -> ReadResult:
        """Copy a record into `out`, unless it was overwritten or is damaged."""
        magic, record_bytes, num_slots, found = _HEADER.unpack_from(self._memory)
        if magic != _MAGIC or record_bytes != out.nbytes or found != fingerprint:
            return "corrupt"
        if not num_slots or _LINE + num_slots * _stride(record_bytes) > len(self._memory):
            return "corrupt"
        start = self._start(wanted.sequence, record_bytes)
        sequence, checksum, num_key, key = _SLOT.unpack_from(self._memory, start)
        if sequence != wanted.sequence or not sequence:
            return "missing"
        begin = start + _SLOT.size
        out[:] = self._memory[begin : begin + record_bytes]
        is_intact = zlib.crc32(out, zlib.crc32(wanted.key)) == checksum
        return "read" if is_intact and key[:num_key] == wanted.key else "corrupt"

    def _start(self, sequence: int, record_bytes: int) -> int:
        (_, _, num_slots, _) = _HEADER.unpack_from(self._memory)
        return _LINE + (sequence - 1) % num_slots * _stride(record_bytes)


def _stride(record_bytes: int) -> int:
    return -(-(_SLOT.size + record_bytes) // _LINE) * _LINE


class PeerExport:
    """The store of an engine that computes prompts for others: the writer of a ring."""

    name = "peer"

    def __init__(
        self, ring: RecordRing, *, source: str, record_bytes: int, fingerprint: bytes
    ) -> None:
        self._ring = ring
        self._source = source
        self._record_bytes = record_bytes
        self.fingerprint = fingerprint
        self._num_slots = ring.format(record_bytes, fingerprint)
        self._lock = Lock()
        self._sequence = 0
        self._records: OrderedDict[bytes, int] = OrderedDict()  # key -> sequence, the oldest first
        self._expected: set[bytes] = set()
        self._writes = self._hits = self._misses = self._evictions = 0

    def expect(self, keys: Iterable[bytes]) -> None:
        """Take the records of these keys until they are handed over, and no others."""
        with self._lock:
            self._expected.update(keys)

    def wants(self, key: bytes) -> bool:
        return key in self._expected

    def contains(self, key: bytes) -> bool:
        """Whether a record is stored, and will not be overwritten soon."""
        sequence = self._records.get(key, 0)
        return sequence > self._sequence - self._num_slots * 3 // 4 and sequence > 0

    def sequence(self, key: bytes) -> int:
        """The number of a record that `contains` knows; 0: there is none."""
        return self._records.get(key, 0) if self.contains(key) else 0

    def put(self, key: bytes, record: memoryview) -> bool:
        with self._lock:
            if self.contains(key):
                return True
            self._sequence += 1
            sequence = self._sequence
        self._ring.write(sequence, key, record)
        with self._lock:
            self._records[key] = sequence
            self._records.move_to_end(key)
            self._writes += 1
            if len(self._records) > self._num_slots:
                self._records.popitem(last=False)
                self._evictions += 1
        return True

    def get(self, key: bytes, out: memoryview) -> bool:
        sequence = self._records.get(key)
        found = sequence is not None and (
            self._ring.read(PeerRecord(key, sequence), out, self.fingerprint) == "read"
        )
        with self._lock:
            self._hits += found
            self._misses += not found
        return found

    def hand_over(self, keys: Iterable[bytes]) -> HandedBlocks:
        """Where another engine finds these blocks; those that are not stored have failed."""
        with self._lock:
            wanted = list(keys)
            self._expected.difference_update(wanted)
            found = [
                PeerRecord(key, sequence)
                for key in wanted
                if (sequence := self._records.get(key)) is not None
            ]
        return HandedBlocks(self._source, found, num_failed=len(wanted) - len(found))

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(
                num_records=len(self._records),
                num_bytes=len(self._records) * self._record_bytes,
                max_bytes=self._num_slots * self._record_bytes,
                hits=self._hits,
                misses=self._misses,
                writes=self._writes,
                evictions=self._evictions,
            )

    def close(self) -> None:
        with self._lock:
            self._records.clear()


class RecordSource(Protocol):
    """Where the records of one other engine are read."""

    def read(self, wanted: PeerRecord, out: memoryview, limit_s: float) -> ReadResult:
        """Copy a record into `out`. If the result is not "read", `out` is undefined.

        `limit_s`: a source that would take longer returns "missing".
        """
        ...

    def close(self) -> None: ...


class LocalSource:
    """The ring of an engine of this server."""

    def __init__(self, ring: RecordRing, fingerprint: bytes) -> None:
        self._ring = ring
        self._fingerprint = fingerprint

    def read(self, wanted: PeerRecord, out: memoryview, limit_s: float) -> ReadResult:
        del limit_s  # a copy in memory
        return self._ring.read(wanted, out, self._fingerprint)

    def close(self) -> None:
        """Leave the memory to its owner."""


class _Transfer:
    """The records of one prompt."""

    __slots__ = ("began", "source")

    def __init__(self, source: str) -> None:
        self.source = source
        self.began: float | None = None  # None: no record was read


class PeerStore:
    """The store of an engine that reads what others have computed. It finds what was announced to it.

    `connect` makes the source of an engine that is not in `sources`, by its name. `limit_s`: what a prompt
    still lacks after so many seconds from its first record is not read any more.
    """

    name = "peer"

    def __init__(
        self,
        sources: Mapping[str, RecordSource],
        *,
        record_bytes: int,
        connect: Callable[[str], RecordSource] | None = None,
        limit_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources = dict(sources)
        self._connect = connect
        self._limit_s = limit_s
        self._clock = clock
        self._record_bytes = record_bytes
        self._lock = Lock()
        self._announced: OrderedDict[bytes, tuple[_Transfer, int]] = OrderedDict()
        self._hits = self._misses = self._refused = self._corrupt = self._evictions = 0

    def announce(self, handed: HandedBlocks) -> None:
        """Make the blocks of a prompt findable. The latest announcement of a key counts."""
        transfer = _Transfer(handed.source)
        with self._lock:
            for key, sequence, _ in handed.records:
                self._announced[key] = transfer, sequence
                self._announced.move_to_end(key)
            while len(self._announced) > _MAX_ANNOUNCED:
                self._announced.popitem(last=False)
                self._evictions += 1

    def contains(self, key: bytes) -> bool:
        return key in self._announced

    def get(self, key: bytes, out: memoryview) -> bool:
        """Copy a record into `out`, once: the device has it from then on, or it is lost."""
        with self._lock:
            found = self._announced.get(key)
            source = None if found is None else self._source(found[0].source)
        result: ReadResult = "missing"
        if found is not None and source is not None:
            transfer, sequence = found
            left_s = self._left(transfer)
            if left_s > 0:
                result = source.read(PeerRecord(key, sequence), out, left_s)
            if result == "lost":
                self._lose(transfer.source)
        with self._lock:
            if self._announced.get(key) == found:
                self._announced.pop(key, None)
            self._hits += result == "read"
            self._misses += result != "read"
            self._corrupt += result == "corrupt"
        return result == "read"

    def _left(self, transfer: _Transfer) -> float:
        """Seconds that are left for the records of a prompt."""
        now = self._clock()
        if transfer.began is None:
            transfer.began = now
        return transfer.began + self._limit_s - now

    def _source(self, name: str) -> RecordSource | None:
        if name not in self._sources and self._connect is not None:
            self._sources[name] = self._connect(name)
        return self._sources.get(name)

    def _lose(self, name: str) -> None:
        """Forget the records of an engine that is out of reach: each would wait for it."""
        with self._lock:
            lost = [key for key, (each, _) in self._announced.items() if each.source == name]
            for key in lost:
                del self._announced[key]
        _log.warning("prefill engine %s is out of reach: %d KV blocks are lost", name, len(lost))

    def wants(self, key: bytes) -> bool:
        del key
        return False

    def put(self, key: bytes, record: memoryview) -> bool:  # noqa: ARG002
        """Refuse: only the engine that computes a prompt stores its blocks."""
        with self._lock:
            self._refused += 1
        return False

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(
                num_records=len(self._announced),
                num_bytes=len(self._announced) * self._record_bytes,
                max_bytes=_MAX_ANNOUNCED * self._record_bytes,
                hits=self._hits,
                misses=self._misses,
                refused=self._refused,
                corrupt=self._corrupt,
                evictions=self._evictions,
            )

    def close(self) -> None:
        with self._lock:
            self._announced.clear()
            for source in self._sources.values():
                source.close()
