"""An SQLite file whose commits are durable, for an event loop.

SQLite's write-ahead log is synced at every commit: what was committed survives kill -9 and a power cut.
"""

from __future__ import annotations

import asyncio
import errno
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from windlass.serve.problems import StorageError

T = TypeVar("T")

_BUSY_S = 30.0  # another process may be writing


class Database:
    """Owns the connection, and the thread in which all transactions run."""

    def __init__(self, path: Path, schema: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="windlass-database")
        with storage_errors(path):
            self._connection = sqlite3.connect(
                path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
            self._connection.executescript(
                f"PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; BEGIN; {schema} COMMIT;"
            )
        self._path = path

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in a transaction, in the database's thread; returns when it is on disk."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._transact, work)

    def run_blocking(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """`run` without an event loop: at the start and the end of the server."""
        return self._thread.submit(self._transact, work).result()

    def _transact(self, work: Callable[[sqlite3.Connection], T]) -> T:
        connection = self._connection
        with storage_errors(self._path):
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:  # SQLite ends it by itself when the disk is full
                    connection.execute("ROLLBACK")
                raise
            return result

    def close(self) -> None:
        """Wait for running work, and close the file."""
        self._thread.shutdown(wait=True)
        self._connection.close()


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn errors of the disk into StorageError."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _full(path) from error
        raise StorageError(f"{path}: {error.strerror or error}.") from error
    except sqlite3.Error as error:
        if error.sqlite_errorname == "SQLITE_FULL":
            raise _full(path) from error
        raise StorageError(f"{path}: {error}.") from error


def _full(path: Path) -> StorageError:
    return StorageError(f"the disk of {path.parent} is full. Free some space, or delete files.")
