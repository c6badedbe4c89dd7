"""Loads and unloads the adapters of all replicas of a model, and brings new replicas up to date.

The ingress has the list of adapters; a fleet whose adapters change has one ingress. A replica that
starts has those of the fleet file. The ingress sees in its report what it lacks, and sends that. A
request for an adapter that is not there yet waits in the replica.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from windlass.errors import AdapterConflict, EngineError, WorkerDied
from windlass.serve.adapter_registry import AdapterRegistry, Change
from windlass.serve.http.messages import ErrorMessage
from windlass.serve.messages import LoadAdapter, UnloadAdapter

_log = logging.getLogger("windlass.cluster")


@dataclass(frozen=True, slots=True)
class AdapterResult:
    """What a replica did with a change. `num_running`: requests that still use an unloaded adapter."""

    replica: str
    num_running: int = 0
    error: ErrorMessage | None = None


# Calls all replicas that are up with changes; those that are gone have no result.
Broadcast = Callable[[Sequence[Change]], Awaitable[Sequence[AdapterResult]]]


class FleetAdapters:
    """Owns the adapters of one model. `broadcast` applies changes to all of its replicas."""

    def __init__(self, model: str, broadcast: Broadcast) -> None:
        # Whether another model or adapter of the fleet has a name.
        self.is_taken: Callable[[str], bool] = lambda _: False
        self.registry = AdapterRegistry()
        self._model = model
        self._broadcast = broadcast
        self._failed: set[str] = set()  # replicas that could not be brought up to date
        self._syncing: asyncio.Task[None] | None = None

    async def change(self, change: Change) -> int:
        """Load or unload an adapter in all replicas or none; returns how many requests still use it."""
        if isinstance(change, LoadAdapter) and self.is_taken(change.name):
            raise AdapterConflict(
                f"another model of the fleet, or an adapter of one, has the name {change.name!r}.",
                "lora_name",
            )
        return await self.registry.change(change, [self])

    async def change_adapter(self, change: Change) -> int:
        """Apply a change for the registry, which lets one call at a time change a name."""
        results = await self._broadcast([change])
        if not results:
            raise WorkerDied(
                f"no replica of {self._model} is up to change the adapter {change.name!r}. Send a "
                "request to start one, then try again."
            )
        failed = [each for each in results if each.error is not None]
        if failed:
            raise await self._undone(change, results, failed)
        return sum(each.num_running for each in results)

    async def _undone(
        self,
        change: Change,
        results: Sequence[AdapterResult],
        failed: Sequence[AdapterResult],
    ) -> EngineError:
        """The error of a change that some replicas refused; a load is undone in the others."""
        first = failed[0].error
        assert first is not None
        text = f"{len(failed)} of {len(results)} replicas of {self._model} ({_names(failed)}): {first.message}"
        if isinstance(change, LoadAdapter):
            undone = await self._broadcast([UnloadAdapter(change.name)])
            kept = [each for each in undone if each.error is not None]
            text += f" {_names(kept)} may still have it." if kept else " It is loaded nowhere."
        else:
            text += f" The others have unloaded {change.name!r}."
        error = first.error()
        error.args = (text, *error.args[1:])
        return error

    def sync(self, found: Mapping[str, tuple[dict[str, str], dict[str, tuple[str, ...]]]]) -> None:
        """Send replicas what they lack. `found`: the folders of each one's adapters, and their roots.

        The first call begins with the adapters of the replica that has most: an ingress that is
        restarted does not know what was loaded before.
        """
        self._failed &= found.keys()
        if self.registry.is_changing:
            return  # the reports may be older than the change
        missing: list[Change] = []
        for replica, (folders, roots) in sorted(found.items(), key=lambda each: -len(each[1][0])):
            changes = self.registry.sync_after_start(folders, roots=roots)
            if replica not in self._failed:
                missing += [each for each in changes if each not in missing]
        if missing and (self._syncing is None or self._syncing.done()):
            self._syncing = asyncio.create_task(self._send(missing))

    async def _send(self, changes: Sequence[Change]) -> None:
        """Apply changes; replicas that have them ignore them."""
        for result in await self._broadcast(changes):
            if result.error is not None:
                self._failed.add(result.replica)
                _log.error(
                    "the replica %s of %s lacks an adapter of the others: %s",
                    result.replica,
                    self._model,
                    result.error.message,
                )

    def close(self) -> None:
        if self._syncing is not None:
            self._syncing.cancel()


def _names(results: Sequence[AdapterResult]) -> str:
    return ", ".join(each.replica for each in results)
