"""Usage of tenants in SQLite: requests, tokens and costs per hour, tenant, key and model.

Sums wait in memory for at most half a second before the database's thread writes them, so a killed
server loses less than a second of them. A request counts when it ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from windlass.config import ServeConfig
from windlass.errors import ConfigError, RequestError
from windlass.serve.batch.database import Database
from windlass.serve.problems import StorageError
from windlass.serve.tenants import Budget

_log = logging.getLogger("windlass.serve")

_WRITE_EVERY_S = 0.5
_HOUR_S = 3600
_MAX_ROWS = 50_000
_SCHEMA = """
CREATE TABLE IF NOT EXISTS usage (
    hour INTEGER, tenant TEXT, key_id TEXT, model TEXT,
    requests INTEGER, prompt_tokens INTEGER, cached_tokens INTEGER, output_tokens INTEGER, usd REAL,
    PRIMARY KEY (hour, tenant, key_id, model)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS usage_by_tenant ON usage (tenant, hour);
"""
# By bucket: its start in seconds since 1970, in SQL.
BUCKETS = {
    "hour": "hour",
    "day": "CAST(strftime('%s', hour, 'unixepoch', 'start of day') AS INTEGER)",
    "month": "CAST(strftime('%s', hour, 'unixepoch', 'start of month') AS INTEGER)",
}


class Numbers(NamedTuple):
    """Sums of requests."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    usd: float = 0.0

    def plus(self, other: Numbers) -> Numbers:
        return Numbers(
            requests=self.requests + other.requests,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            usd=self.usd + other.usd,
        )


class UsageKey(NamedTuple):
    """What usage is summed up by."""

    tenant: str
    key_id: str
    model: str


class UsageQuery(NamedTuple):
    """Which usage to return: seconds since 1970, and None for all tenants."""

    since: int
    until: int
    bucket: str = "day"
    tenant: str | None = None


class UsageStore:
    """Owns the database. `clock` returns seconds since 1970."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._pending: dict[tuple[int, UsageKey], Numbers] = {}
        self._spent: dict[tuple[str, str], tuple[int, float]] = {}  # period's start, dollars
        self._lock = asyncio.Lock()
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            self._database = Database(path, _SCHEMA)
            self._database.run_blocking(self._load_spent)
        except (OSError, StorageError) as error:
            raise ConfigError(f"--usage-db {path} cannot be opened: {error}") from error

    def now(self) -> int:
        return int(self._clock())

    # ---- input -------------------------------------------------------------------------------

    def add(self, key: UsageKey, numbers: Numbers) -> None:
        """Add a request or a part of it; written within half a second."""
        now = self.now()
        at = now - now % _HOUR_S, key
        self._pending[at] = self._pending.get(at, Numbers()).plus(numbers)
        for per in ("day", "month"):
            start = period_start(now, per)
            began, usd = self._spent.get((key.tenant, per), (start, 0.0))
            self._spent[key.tenant, per] = start, numbers.usd + (usd if began == start else 0.0)

    async def write_forever(self) -> None:
        """Write what was added, every half second."""
        while True:
            await asyncio.sleep(_WRITE_EVERY_S)
            try:
                await self.write()
            except StorageError as error:
                _log.error("usage is not written, and is tried again: %s", error)

    async def write(self) -> None:
        """Write what was added so far; after an error it is kept for the next call."""
        async with self._lock:
            batch, self._pending = self._pending, {}
            if not batch:
                return
            try:
                await self._database.run(lambda connection: _write(connection, batch))
            except StorageError:
                for at, numbers in batch.items():
                    self._pending[at] = self._pending.get(at, Numbers()).plus(numbers)
                raise

    # ---- output ------------------------------------------------------------------------------

    def spent(self, tenant: str, budget: Budget) -> float:
        """Dollars of a tenant in the budget's current day or month."""
        began, usd = self._spent.get((tenant, budget.per), (0, 0.0))
        return usd if began == period_start(self.now(), budget.per) else 0.0

    def seconds_left(self, budget: Budget) -> float:
        """Until the budget's next day or month."""
        now = self.now()
        # 32 days after its first second, a month has ended.
        later = period_start(now, budget.per) + (24 if budget.per == "day" else 32 * 24) * _HOUR_S
        return float(period_start(later, budget.per) - now)

    async def read(self, query: UsageQuery) -> list[tuple[int, UsageKey, Numbers]]:
        """Sums by bucket, tenant, key and model, the oldest first; includes all that was added."""
        await self.write()
        rows = await self._database.run(lambda connection: _read(connection, query))
        if len(rows) > _MAX_ROWS:
            raise RequestError(
                f"more than {_MAX_ROWS:,} rows; ask for a shorter time, one tenant or longer buckets."
            )
        return [(row[0], UsageKey(*row[1:4]), Numbers(*row[4:])) for row in rows]

    def _load_spent(self, connection: sqlite3.Connection) -> None:
        """Read what was spent in the current day and month before this start."""
        for per in ("day", "month"):
            start = period_start(self.now(), per)
            query = "SELECT tenant, SUM(usd) FROM usage WHERE hour >= ? GROUP BY tenant"
            for tenant, usd in connection.execute(query, (start,)):
                self._spent[tenant, per] = start, usd

    def close(self) -> None:
        """Write the rest, and close the file."""
        try:
            self._database.run_blocking(lambda connection: _write(connection, self._pending))
        except StorageError as error:
            _log.error("the last usage is lost: %s", error)
        self._database.close()


def period_start(now: int, per: str) -> int:
    """The first second of the day or month of UTC that contains `now`."""
    day = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return int((day if per == "day" else day - timedelta(days=day.day - 1)).timestamp())


def _write(connection: sqlite3.Connection, batch: dict[tuple[int, UsageKey], Numbers]) -> None:
    sums = ", ".join(f"{name} = {name} + excluded.{name}" for name in Numbers._fields)
    connection.executemany(
        f"INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET {sums}",
        [(hour, *key, *numbers) for (hour, key), numbers in batch.items()],
    )


def _read(connection: sqlite3.Connection, query: UsageQuery) -> list[tuple[Any, ...]]:
    sums = ", ".join(f"SUM({name})" for name in Numbers._fields)
    where, values = "hour >= ? AND hour < ?", [query.since, query.until]
    tenants = () if query.tenant is None else (query.tenant,)
    if tenants:
        where += " AND tenant = ?"
    return connection.execute(
        f"SELECT {BUCKETS[query.bucket]} AS start, tenant, key_id, model, {sums} FROM usage "
        f"WHERE {where} GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4 LIMIT {_MAX_ROWS + 1}",
        (*values, *tenants),
    ).fetchall()


def make_usage_store(config: ServeConfig, has_keys: bool) -> UsageStore | None:
    """Open the store; None: no --usage-db, and no keys or no --data-dir."""
    if config.usage_db is not None:
        return UsageStore(Path(config.usage_db).expanduser())
    if config.data_dir is not None and has_keys:
        return UsageStore(Path(config.data_dir).expanduser() / "usage.sqlite")
    return None
