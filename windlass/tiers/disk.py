"""The disk tier: records in files, which outlive the engine and which engines on one host share.

A record is written to a temporary file and renamed, so that a name always has a whole file. Files
are fsynced behind, when writes pause: before each rename it would cost 4 to 15 times the speed, and
a file that a power failure cuts short is recognised by its checksum. The size limit counts all
records under the directory, also those of other models; the least recently used go first.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from windlass.errors import ConfigError
from windlass.tiers.disk_files import (
    Writer,
    fingerprint_folders,
    on_disk,
    open_directory,
    record_path,
    remove_dead_writers,
    write_description,
    writers_changed_ns,
    writers_of,
)
from windlass.tiers.disk_index import DiskIndex
from windlass.tiers.fingerprint import Fingerprint
from windlass.tiers.record import HEADER_BYTES, HITS, HITS_OFFSET, check_record, make_header
from windlass.tiers.store import StoreStats

_log = logging.getLogger("windlass.tiers")

_RETRY_S = 60.0  # after an error, until the next write is tried
_TICK_S = 1.0  # between looks for records of other engines
_LISTING_SHARE = 0.02  # of the time may be spent with them
_HOUSEKEEPING_S = 60.0  # between looks at other models' records, and for dead writers
_MAX_UNSYNCED = 4096  # later records push older ones out, which the kernel writes by itself
_MAX_HITS = 2**63
# Windows has neither flag; `open_directory` refuses it.
_READ = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _READ
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_FOREIGN = (
    errno.ELOOP,
    errno.EISDIR,
    errno.ENXIO,
)  # a link, directory or socket: no store makes one


class DiskStore:
    """Owns the records of one fingerprint, and with other stores the size of the directory."""

    name = "disk"

    def __init__(
        self,
        directory: str | Path,
        *,
        fingerprint: Fingerprint,
        max_bytes: int,
        record_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file_bytes = on_disk(HEADER_BYTES + record_bytes)
        if max_bytes < self._file_bytes:
            raise ConfigError(
                f"--prefix-cache-gb allows {max_bytes:,} bytes, and one block takes "
                f"{self._file_bytes:,}. Set a larger size."
            )
        self._directory = open_directory(directory)
        self._fingerprint = fingerprint
        self._folder = self._directory / fingerprint.digest.hex()
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._index = DiskIndex()
        self._counts: Counter[str] = Counter()
        self._writer: Writer | None = None
        self._num_files = 0
        self._retry_at = 0.0  # no write before, after an error
        self._warned: set[str] = set()
        self._unsynced: deque[str] = deque(maxlen=_MAX_UNSYNCED)
        self._writers_changed_ns = 0
        self._next_listing = self._next_housekeeping = 0.0
        try:
            self._remove_dead_writers()
            self.refresh(all_models=True)
        except OSError as error:
            raise ConfigError(
                f"--prefix-cache-dir {self._directory} cannot be read: {error.strerror or error}."
            ) from error
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._work_behind, name="windlass-disk-tier", daemon=True
        )
        self._thread.start()

    # ---- records -----------------------------------------------------------------------------

    def contains(self, key: bytes) -> bool:
        return self._path(key) in self._index

    def get(self, key: bytes, out: memoryview) -> bool:
        path = self._path(key)
        try:
            descriptor = _open_record(path)
        except FileNotFoundError:
            return self._miss(path)
        except OSError as error:
            if error.errno in _FOREIGN:
                return self._corrupt(path)
            self._warn("read", f"{path} cannot be opened ({error.strerror})")
            return self._miss(path)
        try:
            if not self._read(descriptor, key, out):
                return self._corrupt(path)
        except OSError as error:
            self._warn("read", f"{path} cannot be read ({error.strerror})")
            return self._corrupt(path)
        finally:
            os.close(descriptor)
        with self._lock:
            self._index.touch(path)
            self._counts["hits"] += 1
        return True

    def put(self, key: bytes, record: memoryview) -> bool:
        path = self._path(key)
        if path in self._index and _refresh_age(path):
            with self._lock:
                self._index.touch(path)
            return True
        if self._clock() < self._retry_at:
            return self._refuse()
        try:
            self._make_room()
            self._write(path, key, record)
        except IsADirectoryError:
            self._warn("foreign", f"{path} is a directory, which no engine made. Remove it")
            return self._refuse()
        except OSError as error:
            self._retry_at = self._clock() + _RETRY_S
            self._warn(
                "write",
                f"{self._directory} cannot be written ({error.strerror}). Records are still read; "
                f"a write is tried again every {_RETRY_S:.0f} s",
            )
            return self._refuse()
        self._warned.discard("write")
        with self._lock:
            self._index.add(path, self._file_bytes, time.time_ns())
            self._unsynced.append(path)
            self._counts["writes"] += 1
        return True

    def stats(self) -> StoreStats:
        """Counters of this store; the records and bytes are those of the whole directory.

        The engine's loop calls it, which must not wait for the lock: its holder may wait for the disk.
        """
        return StoreStats(
            **self._counts,
            num_records=len(self._index),
            num_bytes=self._index.num_bytes,
            max_bytes=self._max_bytes,
        )

    def refresh(self, *, all_models: bool = False) -> None:
        """Find records that other engines have written, of this model or of all models."""
        folders = list(fingerprint_folders(self._directory).values()) if all_models else []
        found = self._index.find_new({self._folder, *folders})
        with self._lock:
            self._index.add_all(found)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        with self._lock:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    # ---- files -------------------------------------------------------------------------------

    def _path(self, key: bytes) -> str:
        return record_path(str(self._folder), key)

    def _read(self, descriptor: int, key: bytes, out: memoryview) -> bool:
        """Read and check a record; counts the hit in its header, which renews its age."""
        header = bytearray(HEADER_BYTES)
        num_read = os.preadv(descriptor, [header, out, bytearray(1)], 0)
        found = check_record(header, out) if num_read == len(header) + out.nbytes else None
        if found is None or (found.fingerprint, found.key) != (self._fingerprint.digest, key):
            return False
        with suppress(OSError):  # a directory that cannot be written: the age stays
            os.pwrite(descriptor, HITS.pack(min(found.hits, _MAX_HITS) + 1), HITS_OFFSET)
        return True

    def _write(self, path: str, key: bytes, record: memoryview) -> None:
        header = make_header(self._fingerprint.digest, key, record)
        temporary, descriptor = self._create()
        try:
            with os.fdopen(descriptor, "wb", buffering=0):
                if os.writev(descriptor, [header, record]) != len(header) + record.nbytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.rename(temporary, path)
        except OSError:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def _create(self) -> tuple[str, int]:
        """Create a temporary file; opens a folder for them first, also when it was removed."""
        with self._lock:
            self._num_files += 1
            if self._writer is not None and not os.path.isdir(self._writer.path):
                self._writer.close()
                self._writer = None
            if self._writer is None:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_description(self._folder, self._fingerprint)
                self._writer = Writer(self._folder)
            temporary = f"{self._writer.path}/{self._num_files}"
            return temporary, os.open(temporary, _CREATE, 0o600)

    def _make_room(self) -> None:
        with self._lock:
            num_evicted = self._index.evict(self._max_bytes - self._file_bytes)
            self._counts["evictions"] += num_evicted

    # ---- what goes wrong ---------------------------------------------------------------------

    def _miss(self, path: str) -> bool:
        with self._lock:
            self._index.drop(path)
            self._counts["misses"] += 1
        return False

    def _corrupt(self, path: str) -> bool:
        with suppress(OSError):  # one that cannot be removed stays unknown
            os.unlink(path)
        with self._lock:
            self._counts["corrupt"] += 1
        return self._miss(path)

    def _refuse(self) -> bool:
        with self._lock:
            self._counts["refused"] += 1
        return False

    def _warn(self, what: str, message: str) -> None:
        """Log a warning, if none of its kind was logged since the operation last worked."""
        if what not in self._warned:
            self._warned.add(what)
            _log.warning("prefix cache: %s.", message)

    # ---- behind the engine -------------------------------------------------------------------

    def _work_behind(self) -> None:
        while not self._closed.wait(_TICK_S):
            try:
                self._look_for_others()
                self._sync()
            except OSError as error:
                self._warn(
                    "listing",
                    f"{self._directory} cannot be listed, or its files not synced ({error.strerror})",
                )

    def _look_for_others(self) -> None:
        """List the records of other engines that are alive, and now and then all that are there."""
        now = self._clock()
        if now < self._next_listing:
            return
        all_models = now >= self._next_housekeeping
        own = {self._writer.path} if self._writer is not None else set()
        changed_ns = writers_changed_ns(self._folder)
        if not (
            all_models or changed_ns != self._writers_changed_ns or writers_of(self._folder) - own
        ):
            return
        self._writers_changed_ns = changed_ns
        if all_models:
            self._next_housekeeping = now + _HOUSEKEEPING_S
            self._remove_dead_writers()
        self.refresh(all_models=all_models)
        self._next_listing = now + (self._clock() - now) / _LISTING_SHARE

    def _remove_dead_writers(self) -> None:
        for folder in fingerprint_folders(self._directory).values():
            remove_dead_writers(folder)

    def _sync(self) -> None:
        """Write records to the disk while no new ones arrive."""
        num_files = self._num_files
        while self._unsynced and self._num_files == num_files and not self._closed.is_set():
            path = self._unsynced.popleft()
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _READ)
            except OSError:  # evicted, or no file any more: no error of the disk
                continue
            try:
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _open_record(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR | _READ)
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
        return os.open(path, os.O_RDONLY | _READ)


def _refresh_age(path: str) -> bool:
    """Renew a record's age. False: it is gone."""
    try:
        os.utime(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    except PermissionError:
        return True
    except OSError as error:
        return error.errno == errno.EROFS
    return True
