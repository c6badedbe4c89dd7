"""The HTTP process's list of LoRA adapters, and the load and unload calls in flight.

The engine processes read and hold the weights; all replicas have the same adapters. A restarted
engine starts with the adapters of the command line; the registry computes the changes that bring it
up to date.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from windlass.errors import AdapterConflict, EngineError, WorkerDied
from windlass.serve import messages
from windlass.serve.process import build_error, refusal_error

Change = messages.LoadAdapter | messages.UnloadAdapter


class AdapterEngine(Protocol):
    """An engine that has adapters."""

    async def change_adapter(self, change: Change) -> int:
        """Apply a change; returns the number of running requests that still use the adapter."""
        ...


class AdapterCalls:
    """Owns the changes that one engine process has not answered yet."""

    def __init__(self) -> None:
        self._pending: dict[str, tuple[Change, asyncio.Future[int]]] = {}

    async def call(self, change: Change, send: Callable[[Change], None]) -> int:
        """Send a change and wait for its reply."""
        call: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._pending[change.name] = change, call
        send(change)
        return await call

    def on_reply(self, reply: messages.AdapterReply) -> bool:
        """Resolve the call that waits for this reply; False: there is none."""
        pending, call = self._pending.get(reply.change.name, (None, None))
        if call is None or pending != reply.change:
            return False
        del self._pending[reply.change.name]
        if call.cancelled():
            return True
        if reply.kind:
            call.set_exception(_error(reply))
        else:
            call.set_result(reply.num_running)
        return True

    def fail(self, why: str) -> None:
        """Fail all pending changes: the engine has died."""
        for _, call in self._pending.values():
            if not call.done():
                call.set_exception(WorkerDied(why))
        self._pending.clear()


class AdapterRegistry:
    """Owns the adapter names that requests may use. A name changes by one call at a time."""

    def __init__(self) -> None:
        self.folders: dict[str, str] = {}
        self.roots: dict[str, tuple[str, ...]] = {}  # of adapters that are confined to folders
        # Of the weights, on all hosts: of adapters that the engine started with and that did not change.
        self.versions: dict[str, str] = {}
        self._started = False
        self._changing: dict[str, Change] = {}

    def sync_after_start(
        self,
        initial: dict[str, str],
        versions: Mapping[str, str] = MappingProxyType({}),
        roots: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    ) -> list[Change]:
        """Return the changes that a new engine needs, which has the adapters `initial` of `versions`.

        `roots`: as in `LoadAdapter`, of the adapters that have some. Changes in progress count as done: another engine may have applied them already.
        """
        if not self._started:
            self._started, self.folders, self.roots = True, dict(initial), dict(roots)
        known, known_roots = dict(self.folders), dict(self.roots)
        self.versions |= {
            name: version for name, version in versions.items() if known.get(name) == initial[name]
        }
        for change in self._changing.values():
            if isinstance(change, messages.LoadAdapter):
                known[change.name], known_roots[change.name] = change.folder, change.roots
            else:
                known.pop(change.name, None)
        removed = [name for name in initial if known.get(name) != initial[name]]
        added = [name for name in known if initial.get(name) != known[name]]
        unloads = [messages.UnloadAdapter(name) for name in removed]
        loads = (
            messages.LoadAdapter(name, known[name], known_roots.get(name, ())) for name in added
        )
        return [*unloads, *loads]

    @property
    def is_changing(self) -> bool:
        """Whether an adapter is being loaded or unloaded."""
        return bool(self._changing)

    def check_free(self, name: str) -> None:
        """Raise AdapterConflict if an adapter of this name is loaded."""
        if name in self.folders:
            raise AdapterConflict(
                f"an adapter {name!r} is loaded already. Unload it first, or choose another name.",
                "lora_name",
            )

    async def change(self, change: Change, engines: Sequence[AdapterEngine]) -> int:
        """Apply a change to all engines, or to none; returns how many requests use the adapter."""
        if change.name in self._changing:
            raise AdapterConflict(
                f"the adapter {change.name!r} is being loaded or unloaded by another call.",
                "lora_name",
            )
        if isinstance(change, messages.LoadAdapter):
            # Another call may have loaded it since the caller checked.
            self.check_free(change.name)
        self._changing[change.name] = change
        self.versions.pop(change.name, None)
        work = asyncio.create_task(self._apply(change, engines))
        work.add_done_callback(lambda done: done.cancelled() or done.exception())
        # A caller that disconnects does not undo the change.
        return await asyncio.shield(work)

    async def _apply(self, change: Change, engines: Sequence[AdapterEngine]) -> int:
        try:
            calls = (engine.change_adapter(change) for engine in engines)
            results = await asyncio.gather(*calls, return_exceptions=True)
            errors = [each for each in results if isinstance(each, BaseException)]
            if isinstance(change, messages.LoadAdapter):
                if errors:
                    # An engine that died may have restarted meanwhile, and have loaded it.
                    loaded = [
                        engine
                        for engine, each in zip(engines, results, strict=True)
                        if not isinstance(each, EngineError) or isinstance(each, WorkerDied)
                    ]
                    await unload_from(loaded, change.name)
                    raise errors[0]
                self.folders[change.name] = change.folder
                self.roots[change.name] = change.roots
                return 0
            if not all(isinstance(each, WorkerDied) for each in results):
                # An engine that died meanwhile starts without the adapter.
                self.folders.pop(change.name, None)
                self.roots.pop(change.name, None)
            if len(errors) == len(results):
                raise errors[0]
            return sum(each for each in results if isinstance(each, int))
        finally:
            del self._changing[change.name]

    def reload_failed(self, change: messages.LoadAdapter) -> bool:
        """A restarted engine could not load an adapter again: remove it. True: it was in use."""
        if self.folders.get(change.name) != change.folder:
            return False
        del self.folders[change.name]
        self.roots.pop(change.name, None)
        return True


async def unload_from(engines: Sequence[AdapterEngine], name: str) -> None:
    """Unload an adapter wherever it is loaded, so that all engines have the same ones.

    Engines that do not have it, or have died, need nothing.
    """
    calls = (engine.change_adapter(messages.UnloadAdapter(name)) for engine in engines)
    results = await asyncio.gather(*calls, return_exceptions=True)
    for each in results:
        if isinstance(each, BaseException) and not isinstance(each, EngineError):
            raise each


def _error(reply: messages.AdapterReply) -> EngineError:
    """Rebuild the engine's error with its original class."""
    error = build_error(reply.kind, reply.message)
    if type(error) is not EngineError:
        return error
    return refusal_error(reply.kind, reply.message, "lora_name")
