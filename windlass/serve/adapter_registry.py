"""The HTTP process's list of LoRA adapters, and the load and unload calls in flight.

The engine process reads and holds the weights. A restarted engine starts with the adapters of the
command line; the registry computes the changes that bring it up to date.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from windlass.errors import AdapterConflict, EngineError, WorkerDied
from windlass.serve import messages
from windlass.serve.process import build_error, refusal_error

Change = messages.LoadAdapter | messages.UnloadAdapter


class AdapterRegistry:
    """Owns the adapter names that requests may use, and the pending changes."""

    def __init__(self) -> None:
        self.folders: dict[str, str] = {}
        self._started = False
        self._pending: dict[str, tuple[Change, asyncio.Future[int]]] = {}

    def sync_after_start(self, initial: dict[str, str]) -> list[Change]:
        """Return the changes that a new engine needs, which has loaded the adapters `initial`."""
        if not self._started:
            self._started, self.folders = True, dict(initial)
        known = self.folders
        removed = [name for name in initial if known.get(name) != initial[name]]
        added = [name for name in known if initial.get(name) != known[name]]
        unloads = [messages.UnloadAdapter(name) for name in removed]
        return [*unloads, *(messages.LoadAdapter(name, known[name]) for name in added)]

    def check_free(self, name: str) -> None:
        """Raise AdapterConflict if an adapter of this name is loaded."""
        if name in self.folders:
            raise AdapterConflict(
                f"an adapter {name!r} is loaded already. Unload it first, or choose another name.",
                "lora_name",
            )

    async def change(self, change: Change, send: Callable[[Change], None]) -> int:
        """Send a change and wait for the reply: the number of requests that use the adapter."""
        if change.name in self._pending:
            raise AdapterConflict(
                f"the adapter {change.name!r} is being loaded or unloaded by another call.",
                "lora_name",
            )
        if isinstance(change, messages.LoadAdapter):
            # Another call may have loaded it since the caller checked.
            self.check_free(change.name)
        call: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._pending[change.name] = change, call
        send(change)
        # A caller that disconnects does not undo the change: the reply still updates the registry.
        return await asyncio.shield(call)

    def on_reply(self, reply: messages.AdapterReply) -> None:
        """Apply the engine's reply to the registry and resolve the call that waits for it."""
        change, failed = reply.change, bool(reply.kind)
        if isinstance(change, messages.LoadAdapter) and not failed:
            self.folders[change.name] = change.folder
        elif (
            isinstance(change, messages.UnloadAdapter)
            or self.folders.get(change.name) == change.folder
        ):
            # The second case: an adapter that a restarted engine failed to load again.
            self.folders.pop(change.name, None)
        pending, call = self._pending.get(change.name, (None, None))
        if call is None or pending != change:  # sent by `sync_after_start`: no caller waits
            return
        del self._pending[change.name]
        if failed:
            call.set_exception(_error(reply))
        else:
            call.set_result(reply.num_running)

    def fail(self, why: str) -> None:
        """Fail all pending changes: the engine has died."""
        for _, call in self._pending.values():
            call.set_exception(WorkerDied(why))
        self._pending.clear()


def _error(reply: messages.AdapterReply) -> EngineError:
    """Rebuild the engine's error with its original class."""
    error = build_error(reply.kind, reply.message)
    if type(error) is not EngineError:
        return error
    return refusal_error(reply.kind, reply.message, "lora_name")
