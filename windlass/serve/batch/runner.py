"""Runs the batches of a store: validation, requests, output files, cancellation, expiry.

A batch is in the state that the store has committed. After a crash, or an error of the disk, it
continues from there: requests with a result do not run again.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from filelock import FileLock, Timeout

from windlass.serve.batch.database import storage_errors
from windlass.serve.batch.dispatch import Dispatcher, run_lines, unfinished_result
from windlass.serve.batch.lines import BatchLine, LineError, LineRules, Scan, read_lines, scan
from windlass.serve.batch.results import LineResult, add_results, finished_lines, write_results
from windlass.serve.batch.store import UNFINISHED, BatchRecord, FileRecord, Status, Store
from windlass.serve.problems import StorageError

_log = logging.getLogger("windlass.serve")

Outcome = Literal["completed", "expired", "cancelled"]
Read = Callable[[Sequence[int]], list[BatchLine]]

RETRY_S = 5.0  # after an error of the disk

_MAX_ACTIVE = 8  # batches at once
_TICK_S = 1.0  # other processes may add and cancel batches
_SWEEP_TICKS = 60
_CHUNK = 1_000  # requests that did not run, per commit
_REASONS = {
    "expired": "the completion window of the batch ended before this request was run.",
    "cancelled": "the batch was cancelled before this request was run.",
}


@dataclass(slots=True)
class _Active:
    task: asyncio.Task[None]
    owner: str
    is_running: bool = False  # its requests run, and may be stopped


class BatchRunner:
    """Owns the batches that are running. `rules` returns what a line of an endpoint may be."""

    def __init__(
        self, store: Store, dispatcher: Dispatcher, rules: Callable[[str], LineRules]
    ) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._rules = rules
        self._active: dict[str, _Active] = {}
        self._lock = FileLock(store.folder / "lock")
        self._wake = asyncio.Event()
        self.problems: dict[str, LineError] = {}  # what holds up a batch, by its id

    def wake(self) -> None:
        """Look for new and cancelled batches now."""
        self._wake.set()

    async def run_forever(self) -> None:
        """Run batches until cancelled; one process at a time does so for a store."""
        try:
            await self._acquire()
            num_ticks = 0
            while True:
                self._wake.clear()
                with self._reported("batches"):
                    if num_ticks == 0:
                        await self._store.remove_orphans()
                    if num_ticks % _SWEEP_TICKS == 0:
                        await self._store.delete_expired_files()
                    await self._look()
                num_ticks += 1
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), _TICK_S)
        finally:
            tasks = [active.task for active in self._active.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._lock.release()

    async def _acquire(self) -> None:
        """Wait until no other process runs this store's batches."""
        waited = False
        while True:
            try:
                self._lock.acquire(timeout=0)
                return
            except Timeout:
                if not waited:
                    _log.info("another process runs the batches of %s", self._store.folder)
                waited = True
                await asyncio.sleep(_TICK_S)

    async def _look(self) -> None:
        """Start batches that wait, and stop running ones that were cancelled or have expired."""
        batches = await self._store.unfinished()
        for batch in batches:
            active = self._active.get(batch.id)
            if active is not None and active.is_running and self._stop_reason(batch) is not None:
                active.is_running = False
                active.task.cancel()
        counts = Counter(active.owner for active in self._active.values())
        waiting = [batch for batch in batches if batch.id not in self._active]
        while waiting and len(self._active) < _MAX_ACTIVE:
            batch = min(waiting, key=lambda each: counts[each.owner])  # of equals, the oldest
            waiting.remove(batch)
            counts[batch.owner] += 1
            task = asyncio.create_task(self._supervise(batch))
            self._active[batch.id] = _Active(task, batch.owner)

    def _stop_reason(self, batch: BatchRecord) -> Outcome | None:
        if batch.status == "cancelling":
            return "cancelled"
        if batch.status == "in_progress" and self._store.now() >= batch.expires_at:
            return "expired"
        return None

    async def _supervise(self, batch: BatchRecord) -> None:
        """Advance a batch as far as possible; what is left continues when `_look` starts it again."""
        try:
            current = await self._store.change(batch.id, UNFINISHED)
            if current is not None:
                await self._advance(current)
            self.problems.pop(batch.id, None)
        except StorageError as error:
            _log.error("%s waits: %s", batch.id, error)
            self.problems[batch.id] = LineError("storage_error", str(error))
            await asyncio.sleep(RETRY_S)
        except Exception as error:
            _log.exception("%s failed", batch.id)
            name = type(error).__name__
            await self._fail(batch, LineError("internal_error", f"an internal error: {name}."))
        finally:
            del self._active[batch.id]
            self.wake()

    async def _advance(self, batch: BatchRecord) -> None:
        path, rules = self._store.path_of(batch.input_file_id), self._rules(batch.endpoint)
        if not path.exists():
            await self._fail(batch, LineError("input_file_missing", "the input file is gone."))
            return
        with storage_errors(path):
            found = await asyncio.to_thread(scan, path, rules)
        if batch.status == "validating":
            if found.errors:
                await self._fail(batch, *found.errors)
                return
            started = await self._change(
                batch, "validating", "in_progress", total=len(found.offsets)
            )
            if started is None:
                return  # it was cancelled
            batch = started
        read = partial(_read, self._store, batch, found, rules)
        outcome = self._stop_reason(batch)
        if batch.status == "in_progress" and outcome is None:
            await self._run(batch, read)
            finished = await self._change(batch, "in_progress", "finalizing")
            if finished is None:
                return
            batch = finished
        elif outcome is not None and not found.errors:
            await self._add_unfinished(batch, read, outcome)
        await self._end(batch, outcome or "completed")

    async def _run(self, batch: BatchRecord, read: Read) -> None:
        active = self._active[batch.id]

        async def save(results: Sequence[LineResult]) -> None:
            await self._save(batch, results)
            self.problems.pop(batch.id, None)

        missing = await self._missing(batch)
        active.is_running = True
        try:
            await run_lines(
                missing,
                read=read,
                run=lambda line: self._dispatcher.run(line, batch.owner),
                save=save,
                limit=self._dispatcher.limit,
            )
        finally:
            active.is_running = False

    async def _missing(self, batch: BatchRecord) -> list[int]:
        """The requests without a result."""
        done = await self._store.database.run(
            lambda connection: finished_lines(connection, batch.id)
        )
        return [index for index in range(batch.total) if index not in done]

    async def _save(self, batch: BatchRecord, results: Sequence[LineResult]) -> None:
        await self._store.database.run(
            lambda connection: add_results(connection, batch.id, results)
        )

    async def _add_unfinished(self, batch: BatchRecord, read: Read, outcome: Outcome) -> None:
        """Give every request that did not run an error: no request is lost."""
        missing = await self._missing(batch)
        for start in range(0, len(missing), _CHUNK):
            lines = await asyncio.to_thread(read, missing[start : start + _CHUNK])
            code, message = f"batch_{outcome}", _REASONS[outcome]
            await self._save(batch, [unfinished_result(line, code, message) for line in lines])

    async def _end(self, batch: BatchRecord, outcome: Outcome) -> None:
        """Write the output files, then make them and the last status visible at once."""
        now, lifetime_s = self._store.now(), batch.output_expires_after_s
        files = {}
        for kind, failed in (("output", False), ("error", True)):
            file_id = f"file-{uuid.uuid4().hex}"
            path = self._store.path_of(file_id)
            num_bytes = await write_results(self._store.database, batch.id, path, failed)
            if num_bytes == 0:
                with storage_errors(path):
                    path.unlink()
                continue
            files[f"{kind}_file_id"] = FileRecord(
                id=file_id,
                owner=batch.owner,
                filename=f"{batch.id}_{kind}.jsonl",
                purpose="batch_output",
                bytes=num_bytes,
                created_at=now,
                expires_at=None if lifetime_s is None else now + lifetime_s,
            )
        changes: dict[str, Any] = {name: record.id for name, record in files.items()}
        await self._store.end(
            batch, [*files.values()], status=outcome, **{f"{outcome}_at": now}, **changes
        )
        _log.info("%s is %s", batch.id, outcome)

    async def _change(
        self,
        batch: BatchRecord,
        before: Status,
        after: Literal["in_progress", "finalizing"],
        **changes: Any,
    ) -> BatchRecord | None:
        times = {f"{after}_at": self._store.now()}
        return await self._store.change(batch.id, (before,), status=after, **times, **changes)

    async def _fail(self, batch: BatchRecord, *errors: LineError) -> None:
        _log.warning("%s failed: %s", batch.id, errors[0].message)
        with self._reported(batch.id):
            await self._store.end(
                batch, (), status="failed", failed_at=self._store.now(), errors=list(errors)
            )

    @contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        """Log an error of the disk: what was to be done is tried again later."""
        try:
            yield
        except StorageError as error:
            _log.error("%s: %s", what, error)


def _read(
    store: Store, batch: BatchRecord, found: Scan, rules: LineRules, indices: Sequence[int]
) -> list[BatchLine]:
    path = store.path_of(batch.input_file_id)
    with storage_errors(path):
        return read_lines(path, found.offsets, indices, rules.max_line_bytes)
