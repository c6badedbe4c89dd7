"""The results of a batch's requests, which are durable before they are counted."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.serve.batch.database import Database, storage_errors

SCHEMA = """
CREATE TABLE IF NOT EXISTS results (
    batch_id TEXT, line INTEGER, failed INTEGER, text BLOB, PRIMARY KEY (batch_id, line)
) WITHOUT ROWID;
-- Counting must not read the texts.
CREATE INDEX IF NOT EXISTS results_by_failed ON results (batch_id, failed);
"""

_ROWS_PER_READ = 256


@dataclass(frozen=True, slots=True)
class LineResult:
    """The line of the output or error file for one request."""

    index: int  # of the request
    failed: bool
    text: bytes


@dataclass(frozen=True, slots=True)
class Counts:
    completed: int = 0
    failed: int = 0


def add_results(
    connection: sqlite3.Connection, batch_id: str, results: Sequence[LineResult]
) -> None:
    """Add results; the first result of a request stands."""
    connection.executemany(
        "INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?)",
        [(batch_id, each.index, each.failed, each.text) for each in results],
    )


def finished_lines(connection: sqlite3.Connection, batch_id: str) -> set[int]:
    rows = connection.execute("SELECT line FROM results WHERE batch_id = ?", (batch_id,))
    return {line for (line,) in rows}


def count_results(connection: sqlite3.Connection, batch_id: str) -> Counts:
    row = connection.execute(
        "SELECT COUNT(*), COALESCE(SUM(failed), 0) FROM results WHERE batch_id = ?", (batch_id,)
    ).fetchone()
    return Counts(completed=row[0] - row[1], failed=row[1])


def sum_usage(connection: sqlite3.Connection, batch_id: str) -> dict[str, Any]:
    """The tokens of all responses, as OpenAI's batches have them."""

    def total(*names: str) -> str:
        paths = ", ".join(f"json_extract(usage, '$.{name}')" for name in names)
        return f"COALESCE(SUM(COALESCE({paths}, 0)), 0)"

    columns = (
        total("prompt_tokens", "input_tokens"),
        total("prompt_tokens_details.cached_tokens", "input_tokens_details.cached_tokens"),
        total("completion_tokens", "output_tokens"),
        total(
            "completion_tokens_details.reasoning_tokens",
            "output_tokens_details.reasoning_tokens",
        ),
    )
    row = connection.execute(
        f"SELECT {', '.join(columns)} FROM (SELECT json_extract(CAST(text AS TEXT), "
        "'$.response.body.usage') AS usage FROM results WHERE batch_id = ? AND failed = 0)",
        (batch_id,),
    ).fetchone()
    num_input, num_cached, num_output, num_reasoning = row
    return {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": num_cached},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": num_input + num_output,
    }


async def write_results(
    database: Database, batch_id: str, path: Path, failed: bool | None = None
) -> int:
    """Write results to a new file in the order of the requests; returns its size.

    `failed`: only those that failed, or only the others. The file is complete or does not exist.
    """
    partial = path.with_name(path.name + ".tmp")
    kinds = (0, 1) if failed is None else (int(failed),) * 2
    last, num_bytes = -1, 0

    def read(connection: sqlite3.Connection) -> list[tuple[int, bytes]]:
        query = (
            "SELECT line, text FROM results WHERE batch_id = ? AND line > ? AND failed IN (?, ?) "
            "ORDER BY line LIMIT ?"
        )
        return connection.execute(query, (batch_id, last, *kinds, _ROWS_PER_READ)).fetchall()

    with storage_errors(path):
        partial.unlink(missing_ok=True)
        while rows := await database.run(read):
            text = b"".join(line + b"\n" for _, line in rows)
            await asyncio.to_thread(append_private, partial, text)
            last, num_bytes = rows[-1][0], num_bytes + len(text)
        if not num_bytes:
            await asyncio.to_thread(append_private, partial, b"")
        await asyncio.to_thread(publish, partial, path)
    return num_bytes


def append_private(path: Path, text: bytes) -> None:
    """Append to a file that only this account may read."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(file, "ab") as stream:
        stream.write(text)


def publish(partial: Path, path: Path) -> None:
    """Give a file its final name, durably."""
    for each in (partial, None):
        if each is None:
            os.replace(partial, path)
            each = path.parent
        number = os.open(each, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
