"""Shows, checks and removes what disk stores have written, also while engines use the directory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from windlass.errors import ConfigError
from windlass.tiers.disk_files import (
    StoredRecord,
    fingerprint_folders,
    list_records,
    open_directory,
    read_description,
    remove_dead_writers,
)
from windlass.tiers.record import HEADER_BYTES, check_record, parse_header


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """The records of one fingerprint, which `about` describes."""

    fingerprint: str
    about: dict[str, object]
    num_records: int
    num_bytes: int
    hits: int
    last_used_ns: int | None  # None: it has no records
    oldest_ns: int | None


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A file that no engine would use, and why."""

    path: str
    reason: str


def find_models(directory: Path, name: str | None = None) -> dict[bytes, Path]:
    """The folders of all fingerprints, or of those whose model or digest has this name."""
    if not directory.is_dir():
        raise ConfigError(
            f"--prefix-cache-dir {directory}: no such directory. Name the one that the server was "
            "started with."
        )
    open_directory(directory)
    found = fingerprint_folders(directory)
    if name is None:
        return found
    models = {
        digest: str(read_description(folder).get("model")) for digest, folder in found.items()
    }
    chosen = {
        digest: folder
        for digest, folder in found.items()
        if models[digest] == name or (len(name) >= 4 and digest.hex().startswith(name))
    }
    if not chosen:
        known = ", ".join(sorted(set(models.values()))) or "none"
        raise ConfigError(f"--model {name!r}: {directory} has no records of it. It has: {known}.")
    return chosen


def summarise(digest: bytes, folder: Path) -> StoredModel:
    """Add up the records of a fingerprint. Reads every header."""
    records = list(list_records(folder))
    ages = [record.used_ns for record in records]
    return StoredModel(
        fingerprint=digest.hex(),
        about=read_description(folder),
        num_records=len(records),
        num_bytes=sum(record.num_bytes for record in records),
        hits=sum(_hits(record.path) for record in records),
        last_used_ns=max(ages, default=None),
        oldest_ns=min(ages, default=None),
    )


def verify(digest: bytes, folder: Path) -> Iterator[BadRecord | None]:
    """Read every record of a fingerprint; None for each that is intact. Their ages stay."""
    for record in list_records(folder):
        try:
            reason = _problem(digest, record)
        except FileNotFoundError:  # evicted meanwhile
            continue
        except OSError as error:
            reason = f"cannot be read: {error.strerror or error}"
        yield None if reason is None else BadRecord(record.path, reason)


def clear(folder: Path, *, used_before_ns: int | None = None) -> tuple[int, int]:
    """Remove the records that were last used before a time, or all. Returns their number and bytes.

    A folder that is empty then, and that no engine writes into, is removed as well.
    """
    num_removed = num_bytes = num_left = 0
    for record in list_records(folder):
        if used_before_ns is not None and record.used_ns >= used_before_ns:
            num_left += 1
            continue
        with suppress(FileNotFoundError):
            os.unlink(record.path)
            num_removed += 1
            num_bytes += record.num_bytes
    if not remove_dead_writers(folder) and not num_left:
        shutil.rmtree(folder)
    return num_removed, num_bytes


def _hits(path: str) -> int:
    try:
        with open(path, "rb", buffering=0) as file:
            header = parse_header(file.read(HEADER_BYTES))
    except FileNotFoundError:
        return 0
    return 0 if header is None else header.hits


def _problem(digest: bytes, record: StoredRecord) -> str | None:
    with open(record.path, "rb", buffering=0) as file:
        raw = file.read(HEADER_BYTES)
        header = parse_header(raw)
        if header is None:
            return "is no record, or of another version"
        length = os.fstat(file.fileno()).st_size
        if length != HEADER_BYTES + header.num_bytes:
            return f"has {length:,} bytes instead of {HEADER_BYTES + header.num_bytes:,}"
        block = memoryview(file.read(header.num_bytes))
    if check_record(raw, block) is None:
        return "has a wrong checksum"
    if header.fingerprint != digest:
        return f"belongs to the fingerprint {header.fingerprint.hex()}"
    return None if header.key == record.key else f"holds the key {header.key.hex()}"
