"""The files of a disk store. `DiskStore` writes them; `windlass cache` shows them.

    DIRECTORY/FINGERPRINT/fingerprint.json      what the records depend on
    DIRECTORY/FINGERPRINT/KEY.kv                one record (tiers/record.py)
    DIRECTORY/FINGERPRINT/writers/TOKEN/        temporary files of one store, locked while it is open

One file per record: with records of 0.1 to 4 MB a file of many is at most 1.6 times as fast to
write, and no faster to read, but its records could only be evicted together.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Container, Iterator
from dataclasses import asdict
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

from windlass.errors import ConfigError
from windlass.folders import check_private, write_atomically
from windlass.machine.posix import need_posix
from windlass.tiers.fingerprint import DIGEST_BYTES, Fingerprint

_FOLDER = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}")
_RECORD = re.compile(r"(?:[0-9a-f]{2})+\.kv")
_DESCRIPTION = "fingerprint.json"
_WRITERS = "writers"
_UNIT = 4096  # file systems store whole pages


class StoredRecord(NamedTuple):
    """A record's file, whose content was not read. Its modification time is its last use."""

    used_ns: int
    path: str
    num_bytes: int

    @property
    def key(self) -> bytes:
        return bytes.fromhex(Path(self.path).stem)


def open_directory(path: str | Path) -> Path:
    """Create the directory with mode 0700, or check that no other user could have written into it."""
    directory = Path(path).expanduser().absolute()
    need_posix("--prefix-cache-dir", "fcntl", "os.preadv", "os.O_DIRECTORY")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--prefix-cache-dir {directory} cannot be created: {error.strerror or error}. "
            "Choose a directory that you can write."
        ) from error
    check_private(directory, variable="--prefix-cache-dir", use="reads cached KV blocks")
    return directory


def record_path(folder: str, key: bytes) -> str:
    return f"{folder}/{key.hex()}.kv"


def on_disk(num_bytes: int) -> int:
    """The bytes that a file of this length takes."""
    return -(-num_bytes // _UNIT) * _UNIT


def fingerprint_folders(directory: Path) -> dict[bytes, Path]:
    """The folders of all fingerprints by digest. Other entries are not touched."""
    found = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            if _FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                found[bytes.fromhex(entry.name)] = Path(entry.path)
    return found


def list_records(folder: Path, *, known: Container[str] = ()) -> Iterator[StoredRecord]:
    """The records of a folder, except those of `known` paths. One that disappears is left out."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if not _RECORD.fullmatch(entry.name) or entry.path in known:
                continue
            if not entry.is_file(follow_symlinks=False):
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield StoredRecord(status.st_mtime_ns, entry.path, on_disk(status.st_size))


def write_description(folder: Path, fingerprint: Fingerprint) -> None:
    """Store what the records of a folder depend on, for people; the digest is the folder's name."""
    path = folder / _DESCRIPTION
    if not path.is_file():
        write_atomically(path, json.dumps(asdict(fingerprint), indent=2) + "\n")


def read_description(folder: Path) -> dict[str, object]:
    """What the records of a folder depend on; empty if its description is missing or unreadable."""
    try:
        found = json.loads((folder / _DESCRIPTION).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class Writer:
    """Owns a folder for temporary files, which is locked until it is closed or its process has ended."""

    def __init__(self, folder: Path) -> None:
        parent = folder / _WRITERS
        parent.mkdir(mode=0o700, exist_ok=True)
        while True:
            self.path = str(parent / token_hex(8))
            os.mkdir(self.path, mode=0o700)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            # Another store may have taken a folder without a lock for a dead writer's.
            if _try_lock(self._lock) and os.path.isdir(self.path):
                return
            os.close(self._lock)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def writers_of(folder: Path) -> frozenset[str]:
    """The paths of all writers' folders, also of dead writers that are not removed yet."""
    try:
        return frozenset(entry.path for entry in os.scandir(folder / _WRITERS))
    except FileNotFoundError:
        return frozenset()


def writers_changed_ns(folder: Path) -> int:
    """When a writer last came or went; 0: never."""
    try:
        return os.stat(folder / _WRITERS).st_mtime_ns
    except FileNotFoundError:
        return 0


def remove_dead_writers(folder: Path) -> int:
    """Remove the temporary files of writers that have died. Returns the number of living writers."""
    num_living = 0
    for path in writers_of(folder):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        try:
            if _try_lock(lock):
                shutil.rmtree(path, ignore_errors=True)
            else:
                num_living += 1
        finally:
            os.close(lock)
    return num_living


def _try_lock(descriptor: int) -> bool:
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
