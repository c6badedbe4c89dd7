"""The replicas of one engine: their start and end, and the calls that concern all of them.

replica.py knows one engine, and supervisor.py restarts its process. client.py owns the requests, and
sends each to a replica.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq.asyncio

from windlass.core.card import Choice, EngineReport
from windlass.core.memory import Memory
from windlass.core.trace import RequestTrace
from windlass.serve import messages
from windlass.serve.adapter_registry import AdapterRegistry, Change, unload_from
from windlass.serve.loop import Build
from windlass.serve.replica import Replica, ReplicaOwner
from windlass.serve.supervisor import EngineLaunch

_log = logging.getLogger("windlass.serve")


class ReplicaSet:
    """Owns the replicas. Those that are down take part in later calls, once they run again."""

    def __init__(self, num_replicas: int, launch: EngineLaunch, owner: ReplicaOwner) -> None:
        self.replicas = [
            Replica(index, launch, owner, f"replica {index}: " if num_replicas > 1 else "")
            for index in range(num_replicas)
        ]
        self.adapters = AdapterRegistry()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._context: zmq.asyncio.Context | None = None
        self._settings: messages.Configure | None = None  # None: as the engines were built
        self._unloads: set[asyncio.Task[None]] = set()

    # ---- processes ---------------------------------------------------------------------------

    async def start(self) -> EngineReport:
        """Start all engines and wait until they are ready; raises the first error of a build."""
        self._folder = tempfile.TemporaryDirectory(prefix="windlass-")
        self._context = zmq.asyncio.Context()
        folder = Path(self._folder.name)
        starting = [
            asyncio.create_task(
                each.supervisor.start(self._context, folder / f"engine-{each.index}")
            )
            for each in self.replicas
        ]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await asyncio.gather(*(each.supervisor.close() for each in self.replicas))
            raise
        report = self.report
        if len(self.replicas) == 1:
            return report
        blocks = [each.report.capacity.num_blocks for each in self.replicas]
        reason = f"KV blocks of each: {', '.join(map(str, blocks))}"
        replicas = Choice("replicas", str(len(self.replicas)), reason)
        return replace(report, choices=[replicas, *report.choices])

    def build_with(self, *builds: Build) -> None:
        """Set the build functions of the replicas, which were not known at construction."""
        for replica, build in zip(self.replicas, builds, strict=True):
            replica.supervisor.build_with(build)

    async def close(self) -> None:
        """Stop the engine processes."""
        await asyncio.gather(*(each.supervisor.close() for each in self.replicas))
        if self._context is not None:
            self._context.destroy(linger=0)
        if self._folder is not None:
            self._folder.cleanup()

    def kill(self) -> None:
        for replica in self.replicas:
            replica.supervisor.kill()

    def configure(self, settings: messages.Configure) -> None:
        """Change settings of all engines, also of those that are restarted later."""
        self._settings = settings
        for replica in self.replicas:
            replica.configure(settings)

    def sync_after_start(self, replica: Replica, report: EngineReport) -> None:
        """Give an engine that has just started the settings and adapters of the others."""
        if self._settings is not None:
            replica.configure(self._settings)
        for change in self.adapters.sync_after_start(report.adapters, report.adapter_versions):
            replica.send_change(change)

    # ---- calls of all replicas ---------------------------------------------------------------

    async def reset_prefix_cache(self) -> int:
        self._check_all_up()
        return sum(await asyncio.gather(*(each.reset_prefix_cache() for each in self.up)))

    async def trace(self, request_id: str) -> RequestTrace | None:
        for replica in self.replicas:
            if request_id in replica.untraced:
                return await replica.trace(request_id)
        return None

    async def memory(self) -> dict[int, Memory]:
        up = self.up
        if not up:
            self._check_all_up()
        reports = await asyncio.gather(*(each.memory() for each in up))
        return {each.index: report for each, report in zip(up, reports, strict=True)}

    async def sleep(self) -> None:
        await self._on_all_or_undo(Replica.sleep, Replica.wake)

    async def wake(self) -> None:
        await self._on_all_or_undo(Replica.wake, _keep)

    async def stop_process(self) -> None:
        self._check_all_up()
        await asyncio.gather(*(each.stop_process() for each in self.up))

    async def start_process(self) -> None:
        await self._on_all_or_undo(
            lambda each: each.supervisor.start_process(), Replica.stop_process
        )

    async def change_adapter(self, change: Change) -> int:
        """Load or unload an adapter in all replicas or none.

        Returns the number of running requests that still use it. A replica that is down could not
        say whether it can load the adapter: the change is refused until it is back.
        """
        self._check_all_up()
        return await self.adapters.change(change, self.restartable)

    def on_adapter_reloaded(self, replica: Replica, reply: messages.AdapterReply) -> None:
        """Unload an adapter everywhere that a restarted engine cannot load."""
        change = reply.change
        if not (reply.kind and isinstance(change, messages.LoadAdapter)):
            return
        if self.adapters.reload_failed(change):
            _log.error(
                "%s was unloaded: a restarted engine cannot load it: %s", change.name, reply.message
            )
            others = [each for each in self.restartable if each is not replica]
            unload = asyncio.create_task(unload_from(others, change.name))
            self._unloads.add(unload)
            unload.add_done_callback(self._unloads.discard)

    async def _on_all_or_undo(
        self,
        call: Callable[[Replica], Coroutine[Any, Any, None]],
        undo: Callable[[Replica], Coroutine[Any, Any, None]],
    ) -> None:
        """Call every replica; if one raises, undo the others and raise its error."""
        replicas = self.restartable
        results = await asyncio.gather(*map(call, replicas), return_exceptions=True)
        errors = [each for each in results if each is not None]
        if errors:
            done = [each for each, error in zip(replicas, results, strict=True) if error is None]
            await asyncio.gather(*map(undo, done))
            raise errors[0]

    def _check_all_up(self) -> None:
        """Raise WorkerDied if a replica is down that will run again."""
        for replica in self.restartable:
            replica.supervisor.check_running()

    # ---- state -------------------------------------------------------------------------------

    @property
    def restartable(self) -> list[Replica]:
        """The replicas that run or will run again; all, if there are none."""
        return [each for each in self.replicas if not each.supervisor.has_failed] or self.replicas

    @property
    def up(self) -> list[Replica]:
        """The replicas that would answer now."""
        return [each for each in self.replicas if each.health().ok]

    @property
    def report(self) -> EngineReport:
        """The report of the replica with the fewest KV blocks: its limits hold for all."""
        return min(
            (each.report for each in self.replicas), key=lambda each: each.capacity.num_blocks
        )

    def max_num_seqs(self, replicas: Iterable[Replica]) -> int:
        """Requests that these replicas together run at once."""
        cap = None if self._settings is None else self._settings.caps.max_num_seqs
        own = (each.report.max_num_seqs for each in replicas)
        return sum(each if cap is None else min(cap, each) for each in own)


async def _keep(_replica: Replica) -> None:
    """Undo nothing: an engine that is awake stays so."""
