"""Usage of tenants in SQLite: requests, tokens and costs per hour, tenant, key and model.

Sums wait in memory for at most half a second before the database's thread writes them, so a killed
server loses less than a second of them. A request counts when it ends. While the disk is full, sums
stay in memory, up to `MAX_PENDING` of them, and are written when there is space again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from windlass.config import ServeConfig
from windlass.errors import ConfigError, RequestError
from windlass.serve.batch.database import Database
from windlass.serve.problems import StorageError
from windlass.serve.tenants import Budget

_log = logging.getLogger("windlass.serve")

_WRITE_EVERY_S = 0.5
_HOUR_S = 3600
_MAX_ROWS = 50_000
MAX_PENDING = 100_000  # sums by hour, tenant, key and model that are not written yet: about 40 MB
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


Sums = dict[tuple[int, UsageKey], Numbers]  # by the hour's first second


class UsageQuery(NamedTuple):
    """Which usage to return: seconds since 1970, and None for all tenants."""

    since: int
    until: int
    bucket: str = "day"
    tenant: str | None = None

    def includes(self, hour: int, tenant: str) -> bool:
        return self.since <= hour < self.until and self.tenant in (None, tenant)


class UsageStore:
    """Owns the database, and the sums that are not written yet. `clock` returns seconds since 1970."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.time,
        max_pending: int = MAX_PENDING,
    ) -> None:
        self._clock = clock
        self._max_pending = max_pending
        self._pending: Sums = {}
        self._writing: Sums = {}
        self._is_failing = False
        self.num_write_errors = 0
        self.num_lost_requests = 0
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
        for per in ("day", "month"):
            start = period_start(now, per)
            began, usd = self._spent.get((key.tenant, per), (start, 0.0))
            self._spent[key.tenant, per] = start, numbers.usd + (usd if began == start else 0.0)
        at = now - now % _HOUR_S, key
        if at in self._pending or len(self._pending) < self._max_pending:
            _add(self._pending, at, numbers)
            return
        if not self.num_lost_requests:
            _log.error(
                "usage is lost: %d sums wait in memory for space on the disk, and no more are kept; "
                "windlass:usage_lost_requests_total counts the lost requests",
                len(self._pending),
            )
        self.num_lost_requests += numbers.requests

    async def write_forever(self) -> None:
        """Write what was added, every half second."""
        while True:
            await asyncio.sleep(_WRITE_EVERY_S)
            with contextlib.suppress(StorageError):  # `write` logs it
                await self.write()

    async def write(self) -> None:
        """Write what was added so far; after an error it is kept for the next call."""
        async with self._lock:
            await self._write()

    async def _write(self) -> None:
        if not self._pending:
            return
        batch, self._pending = self._pending, {}
        self._writing = batch
        try:
            await self._database.run(lambda connection: _write(connection, batch))
        except StorageError as error:
            for at, numbers in batch.items():
                _add(self._pending, at, numbers)
            self._on_error(error)
            raise
        finally:
            self._writing = {}
        if self._is_failing:
            self._is_failing = False
            _log.warning("usage is written again, with all that waited in memory")

    def _on_error(self, error: StorageError) -> None:
        """Count it, and log the first error of a row."""
        self.num_write_errors += 1
        if not self._is_failing:
            self._is_failing = True
            _log.warning(
                "usage cannot be written, stays in memory, and is tried again every %g s: %s",
                _WRITE_EVERY_S,
                error,
            )

    # ---- output ------------------------------------------------------------------------------

    def spent(self, tenant: str, budget: Budget) -> float:
        """Dollars of a tenant in the budget's current day or month."""
        began, usd = self._spent.get((tenant, budget.per), (0, 0.0))
        return usd if began == period_start(self.now(), budget.per) else 0.0

    def seconds_left(self, budget: Budget) -> float:
        """Seconds until the budget's current day or month ends."""
        now = self.now()
        # 32 days after its first second, a month has ended.
        later = period_start(now, budget.per) + (24 if budget.per == "day" else 32 * 24) * _HOUR_S
        return float(period_start(later, budget.per) - now)

    @property
    def num_unwritten_requests(self) -> int:
        """Requests that are counted in memory only."""
        return sum(
            each.requests for sums in (self._pending, self._writing) for each in sums.values()
        )

    async def read(self, query: UsageQuery) -> list[tuple[int, UsageKey, Numbers]]:
        """Sums by bucket, tenant, key and model, the oldest first; includes all that was added."""
        async with self._lock:
            with contextlib.suppress(StorageError):  # the rest is read from memory
                await self._write()
            rows = await self._database.run(lambda connection: _read(connection, query))
            pending = dict(self._pending)
        if len(rows) > _MAX_ROWS:
            raise RequestError(
                f"more than {_MAX_ROWS:,} rows; ask for a shorter time, one tenant or longer buckets."
            )
        found: Sums = {(row[0], UsageKey(*row[1:4])): Numbers(*row[4:]) for row in rows}
        for (hour, key), numbers in pending.items():
            if query.includes(hour, key.tenant):
                _add(found, (bucket_start(hour, query.bucket), key), numbers)
        return [(start, key, numbers) for (start, key), numbers in sorted(found.items())]

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
            _log.error(
                "the usage of the last %d requests is lost: %s", self.num_unwritten_requests, error
            )
        self._database.close()


def period_start(now: int, per: str) -> int:
    """The first second of the day or month of UTC that contains `now`."""
    day = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return int((day if per == "day" else day - timedelta(days=day.day - 1)).timestamp())


def bucket_start(hour: int, bucket: str) -> int:
    """The first second of the bucket that contains an hour, as BUCKETS computes it."""
    return hour if bucket == "hour" else period_start(hour, bucket)


def _add(sums: Sums, at: tuple[int, UsageKey], numbers: Numbers) -> None:
    sums[at] = sums.get(at, Numbers()).plus(numbers)


def _write(connection: sqlite3.Connection, batch: Sums) -> None:
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


class UsageMetrics(Collector):
    """The state of the usage database as metrics, read when they are rendered."""

    def __init__(self, store: UsageStore, model_name: str) -> None:
        self._store = store
        self._model = model_name

    def collect(self) -> Iterator[Metric]:
        store, labels = self._store, ["model_name"]
        unwritten = GaugeMetricFamily(
            "windlass:usage_unwritten_requests",
            "Requests whose usage is in memory and not yet in --usage-db.",
            labels=labels,
        )
        unwritten.add_metric([self._model], store.num_unwritten_requests)
        errors = CounterMetricFamily(
            "windlass:usage_write_errors",
            "Failed writes of usage; they are repeated.",
            labels=labels,
        )
        errors.add_metric([self._model], store.num_write_errors)
        lost = CounterMetricFamily(
            "windlass:usage_lost_requests",
            "Requests whose usage was not kept: too many sums waited for space on the disk.",
            labels=labels,
        )
        lost.add_metric([self._model], store.num_lost_requests)
        yield from (unwritten, errors, lost)
