"""Files and batches on disk: their records in SQLite, the contents as files under names of the server.

Each belongs to the key that made it; for another key it does not exist. Several processes may use one
folder; runner.py sees to it that one of them runs the batches.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from windlass.errors import ConfigError, RequestError
from windlass.serve.abbreviate import abbreviate
from windlass.serve.batch import results
from windlass.serve.batch.database import Database, storage_errors
from windlass.serve.batch.lines import LineError
from windlass.serve.batch.results import Counts
from windlass.serve.problems import Busy, ObjectNotFound

T = TypeVar("T", "FileRecord", "BatchRecord")

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
UNFINISHED: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")

_ORPHAN_S = 86_400

_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT, record TEXT
);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT, status TEXT, record TEXT
);
CREATE INDEX IF NOT EXISTS batches_by_status ON batches (status);
{results.SCHEMA}
"""


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A stored file. `filename` is the client's, and only shown."""

    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None

    def json(self) -> dict[str, Any]:
        fields = msgspec.structs.asdict(self)
        del fields["owner"]
        return {**fields, "object": "file", "status": "processed", "status_details": None}


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. Times are seconds since 1970."""

    id: str
    owner: str
    status: Status
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: list[LineError] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    usage: dict[str, Any] | None = None  # of all responses, when it has ended

    def json(self, counts: Counts, problem: LineError | None) -> dict[str, Any]:
        """The batch as clients see it. `problem`: what holds it up now."""
        fields = msgspec.structs.asdict(self)
        for name in ("owner", "output_expires_after_s", "total", "completed", "failed"):
            del fields[name]
        errors = [problem] if problem is not None else self.errors
        return {
            **fields,
            "object": "batch",
            "errors": {"object": "list", "data": errors} if errors else None,
            "request_counts": {
                "total": self.total,
                "completed": counts.completed,
                "failed": counts.failed,
            },
        }


class Page(msgspec.Struct, frozen=True):
    """Which records of a list to return."""

    after: str | None
    limit: int
    ascending: bool = False


class Store:
    """Owns the folder. `clock` returns seconds since 1970."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self.clock = clock
        _make_private(folder)
        _make_private(folder / "files")
        self.database = Database(folder / "batches.sqlite", _SCHEMA)

    def now(self) -> int:
        return int(self.clock())

    def path_of(self, file_id: str) -> Path:
        """Where a file's contents are. `file_id` is one that this store made."""
        return self.folder / "files" / file_id

    def new_upload(self) -> tuple[str, Path]:
        """A new file's id, and the path to write it to before `add_file`."""
        file_id = f"file-{uuid.uuid4().hex}"
        return file_id, self.folder / "files" / f"{file_id}.tmp"

    async def remove_orphans(self) -> None:
        """Remove what a killed process has left: files without a record that are a day old."""

        def known(connection: sqlite3.Connection) -> set[str]:
            return {name for (name,) in connection.execute("SELECT id FROM files")}

        names, oldest = await self.database.run(known), time.time() - _ORPHAN_S
        with storage_errors(self.folder):
            for path in (self.folder / "files").iterdir():
                if path.name not in names and path.stat().st_mtime < oldest:
                    path.unlink(missing_ok=True)

    # ---- files -------------------------------------------------------------------------------

    async def add_file(self, record: FileRecord) -> None:
        await self.database.run(lambda connection: _insert_file(connection, record))

    async def file(self, file_id: str, owner: str) -> FileRecord:
        return await self.database.run(
            lambda connection: _find(connection, "files", file_id, owner, FileRecord)
        )

    async def files(
        self, owner: str, page: Page, purpose: str | None
    ) -> tuple[list[FileRecord], bool]:
        def keep(record: FileRecord) -> bool:
            return purpose is None or record.purpose == purpose

        return await self.database.run(
            lambda connection: _list(connection, "files", owner, page, FileRecord, keep)
        )

    async def delete_file(self, file_id: str, owner: str) -> None:
        def delete(connection: sqlite3.Connection) -> None:
            _find(connection, "files", file_id, owner, FileRecord)
            for batch in _unfinished(connection):
                if batch.input_file_id == file_id:
                    raise Busy(f"{file_id} is the input of {batch.id}, which is {batch.status}.")
            connection.execute("DELETE FROM files WHERE id = ?", (file_id,))

        await self.database.run(delete)
        with storage_errors(self.path_of(file_id)):
            self.path_of(file_id).unlink(missing_ok=True)

    async def num_bytes(self) -> int:
        """The size of all files and of the database."""

        def total(connection: sqlite3.Connection) -> int:
            query = "SELECT COALESCE(SUM(json_extract(record, '$.bytes')), 0) FROM files"
            return int(connection.execute(query).fetchone()[0])

        size = (self.folder / "batches.sqlite").stat().st_size
        return await self.database.run(total) + size

    async def delete_expired_files(self) -> None:
        """Delete the files whose time has come, except inputs of unfinished batches."""
        now = self.now()

        def expired(connection: sqlite3.Connection) -> list[FileRecord]:
            used = {batch.input_file_id for batch in _unfinished(connection)}
            rows = connection.execute(
                "SELECT record FROM files WHERE json_extract(record, '$.expires_at') <= ?", (now,)
            ).fetchall()
            records = [msgspec.json.decode(raw, type=FileRecord) for (raw,) in rows]
            return [record for record in records if record.id not in used]

        for record in await self.database.run(expired):
            await self.delete_file(record.id, record.owner)

    # ---- batches -----------------------------------------------------------------------------

    async def add_batch(self, record: BatchRecord) -> None:
        def add(connection: sqlite3.Connection) -> None:
            _find(connection, "files", record.input_file_id, record.owner, FileRecord)
            connection.execute(
                "INSERT INTO batches (id, owner, status, record) VALUES (?, ?, ?, ?)",
                (record.id, record.owner, record.status, _text(record)),
            )

        await self.database.run(add)

    async def batch(self, batch_id: str, owner: str) -> tuple[BatchRecord, Counts]:
        def find(connection: sqlite3.Connection) -> tuple[BatchRecord, Counts]:
            record = _find(connection, "batches", batch_id, owner, BatchRecord)
            return record, _counts(connection, record)

        return await self.database.run(find)

    async def batches(
        self, owner: str, page: Page
    ) -> tuple[list[tuple[BatchRecord, Counts]], bool]:
        def find(connection: sqlite3.Connection) -> tuple[list[tuple[BatchRecord, Counts]], bool]:
            records, more = _list(
                connection, "batches", owner, page, BatchRecord, lambda _record: True
            )
            return [(record, _counts(connection, record)) for record in records], more

        return await self.database.run(find)

    async def unfinished(self) -> list[BatchRecord]:
        """The batches that are to run, oldest first."""
        return await self.database.run(_unfinished)

    async def change(
        self, batch_id: str, before: Sequence[Status], **changes: Any
    ) -> BatchRecord | None:
        """Change a batch whose status is one of `before`; None: it has another status."""
        return await self.database.run(
            lambda connection: _change(connection, batch_id, before, **changes)
        )

    async def end(
        self, batch: BatchRecord, files: Sequence[FileRecord], **changes: Any
    ) -> BatchRecord | None:
        """Add the files of a batch, forget its results and set its last status, all or nothing."""

        def end(connection: sqlite3.Connection) -> BatchRecord | None:
            counts = results.count_results(connection, batch.id)
            usage = results.sum_usage(connection, batch.id)
            for record in files:
                _insert_file(connection, record)
            connection.execute("DELETE FROM results WHERE batch_id = ?", (batch.id,))
            return _change(
                connection,
                batch.id,
                UNFINISHED,
                completed=counts.completed,
                failed=counts.failed,
                usage=usage,
                **changes,
            )

        return await self.database.run(end)


def _make_private(folder: Path) -> None:
    """Make a folder that only this account may enter; refuses one that others may enter."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        mode = stat.S_IMODE(status.st_mode)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError as error:
        raise ConfigError(f"--data-dir {folder}: {error.strerror or error}.") from error
    if not hasattr(os, "geteuid"):  # Windows: its access control lists are no modes
        return
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"--data-dir {folder} belongs to user {status.st_uid}, who could read the requests of "
            f"clients; this process runs as user {os.geteuid()}. Name a folder of its own."
        )
    if mode & 0o077:
        raise ConfigError(
            f"--data-dir {folder} is open to other users (mode {mode:o}). It holds the requests of "
            f"clients. Run: chmod 700 {folder}"
        )
    if not writable:
        raise ConfigError(f"--data-dir {folder}: cannot be written.")


def _text(record: FileRecord | BatchRecord) -> str:
    return msgspec.json.encode(record).decode()


def _insert_file(connection: sqlite3.Connection, record: FileRecord) -> None:
    connection.execute(
        "INSERT INTO files (id, owner, record) VALUES (?, ?, ?)",
        (record.id, record.owner, _text(record)),
    )


def _find(connection: sqlite3.Connection, table: str, name: str, owner: str, kind: type[T]) -> T:
    row = connection.execute(
        f"SELECT record FROM {table} WHERE id = ? AND owner = ?", (name, owner)
    ).fetchone()
    if row is None:
        what = "file" if kind is FileRecord else "batch"
        raise ObjectNotFound(f"there is no {what} {abbreviate(name)}.", "id")
    return msgspec.json.decode(row[0], type=kind)


def _list(
    connection: sqlite3.Connection,
    table: str,
    owner: str,
    page: Page,
    kind: type[T],
    keep: Callable[[T], bool],
) -> tuple[list[T], bool]:
    """One page of records, and whether there are more."""
    order, relation = ("ASC", ">") if page.ascending else ("DESC", "<")
    query = f"SELECT record FROM {table} WHERE owner = ?"
    values: list[str | int] = [owner]
    if page.after is not None:
        row = connection.execute(
            f"SELECT number FROM {table} WHERE id = ? AND owner = ?", (page.after, owner)
        ).fetchone()
        if row is None:
            raise RequestError(f"after: there is no {abbreviate(page.after)}.", "after")
        query += f" AND number {relation} ?"
        values.append(row[0])
    found: list[T] = []
    for (raw,) in connection.execute(f"{query} ORDER BY number {order}", values):
        record = msgspec.json.decode(raw, type=kind)
        if keep(record):
            if len(found) == page.limit:
                return found, True
            found.append(record)
    return found, False


def _unfinished(connection: sqlite3.Connection) -> list[BatchRecord]:
    places = ", ".join("?" * len(UNFINISHED))
    rows = connection.execute(
        f"SELECT record FROM batches WHERE status IN ({places}) ORDER BY number", UNFINISHED
    )
    return [msgspec.json.decode(raw, type=BatchRecord) for (raw,) in rows]


def _counts(connection: sqlite3.Connection, record: BatchRecord) -> Counts:
    if record.status in UNFINISHED:
        return results.count_results(connection, record.id)
    return Counts(completed=record.completed, failed=record.failed)


def _change(
    connection: sqlite3.Connection, batch_id: str, before: Sequence[Status], **changes: Any
) -> BatchRecord | None:
    row = connection.execute("SELECT record FROM batches WHERE id = ?", (batch_id,)).fetchone()
    record = msgspec.json.decode(row[0], type=BatchRecord)
    if record.status not in before:
        return None
    record = msgspec.structs.replace(record, **changes)
    connection.execute(
        "UPDATE batches SET status = ?, record = ? WHERE id = ?",
        (record.status, _text(record), batch_id),
    )
    return record
