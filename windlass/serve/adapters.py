"""The adapters that a server has, as its HTTP side knows them, and the endpoints that change them.

The engine's process reads and holds them; what was loaded or unloaded since the start is told to
every new one. Only below the operator's folders, and only with an admin key, may anything be loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request

from windlass.errors import (
    AdapterConflict,
    AdapterNotFound,
    CheckpointError,
    ConfigError,
    EngineError,
    RequestError,
    UnsupportedError,
    WorkerDied,
)
from windlass.lora_config import below, check_adapter_name
from windlass.serve import messages
from windlass.serve.keys import Keys
from windlass.serve.problems import AdminOnly
from windlass.serve.process import build_error, refusal_error

if TYPE_CHECKING:
    from windlass.serve.client import EngineClient

Change = messages.LoadAdapter | messages.UnloadAdapter

_FILES = ("adapter_config.json", "adapter_model.safetensors")


class AdapterRegistry:
    """Owns the names that requests may use, and the changes on their way to the engine."""

    def __init__(self) -> None:
        self.folders: dict[str, str] = {}
        self._started = False
        self._calls: dict[str, tuple[Change, asyncio.Future[int]]] = {}

    def restarted(self, first: dict[str, str]) -> list[Change]:
        """A new engine has the adapters of `first`; returns what it must be told beside that."""
        if not self._started:
            self._started, self.folders = True, dict(first)
        known = self.folders
        gone = [name for name in first if known.get(name) != first[name]]
        added = [name for name in known if first.get(name) != known[name]]
        unloads = [messages.UnloadAdapter(name) for name in gone]
        return [*unloads, *(messages.LoadAdapter(name, known[name]) for name in added)]

    def check_free(self, name: str) -> None:
        if name in self.folders:
            raise AdapterConflict(
                f"an adapter {name!r} is loaded already. Unload it first, or choose another name.",
                "lora_name",
            )

    async def change(self, change: Change, send: Callable[[Change], None]) -> int:
        """Tell the engine and wait for its answer: how many requests still use the adapter."""
        if change.name in self._calls:
            raise AdapterConflict(
                f"the adapter {change.name!r} is being loaded or unloaded by another call.",
                "lora_name",
            )
        if isinstance(change, messages.LoadAdapter):
            # Another call may have loaded it since it was last looked at.
            self.check_free(change.name)
        call: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._calls[change.name] = change, call
        send(change)
        # A caller that goes away takes nothing back: the answer is still noted.
        return await asyncio.shield(call)

    def answered(self, answer: messages.AdapterAnswer) -> None:
        """Note what the engine said, and tell who waits for it."""
        asked, failed = answer.asked, bool(answer.kind)
        if isinstance(asked, messages.LoadAdapter) and not failed:
            self.folders[asked.name] = asked.folder
        elif (
            isinstance(asked, messages.UnloadAdapter)
            or self.folders.get(asked.name) == asked.folder
        ):
            # The second: an adapter that a new engine could not load again.
            self.folders.pop(asked.name, None)
        change, call = self._calls.get(asked.name, (None, None))
        if call is None or change != asked:  # nobody's: what a new engine was told
            return
        del self._calls[asked.name]
        if failed:
            call.set_exception(_error(answer))
        else:
            call.set_result(answer.num_running)

    def fail(self, why: str) -> None:
        """The engine is gone; nobody will answer."""
        for _, call in self._calls.values():
            call.set_exception(WorkerDied(why))
        self._calls.clear()


def _error(answer: messages.AdapterAnswer) -> EngineError:
    """What the engine said, as the class that it was raised as."""
    error = build_error(answer.kind, answer.message)
    if type(error) is not EngineError:
        return error
    return refusal_error(answer.kind, answer.message, "lora_name")


class AdapterDoor:
    """Who may load what: an admin key, a good name, and a folder that the operator allows."""

    def __init__(self, client: EngineClient, keys: Keys, roots: tuple[str, ...], base: str) -> None:
        self._client = client
        self._keys = keys
        self._roots = roots
        self._base = base

    def check_admin(self, request: Request) -> None:
        if not self._keys.admins:
            raise AdminOnly("this server has no admin key. Start it with --admin-key KEY.")
        if not self.is_admin(request):
            raise AdminOnly("an admin key is needed: Authorization: Bearer KEY.")

    def is_admin(self, request: Request) -> bool:
        return self._keys.is_admin(request)

    async def load(self, name: str, path: str) -> None:
        """Load an adapter, or raise what speaks against it; then nothing of it stays."""
        try:
            check_adapter_name(name)
        except ConfigError as error:
            raise RequestError(f"lora_name: {error}", "lora_name") from error
        if name == self._base:
            raise AdapterConflict(f"{name!r} is the model's own name.", "lora_name")
        self._client.adapters.check_free(name)
        folder = await asyncio.to_thread(self._allowed, path)
        try:
            await self._client.change_adapter(messages.LoadAdapter(name, str(folder)))
        except (CheckpointError, UnsupportedError) as error:
            raise RequestError(str(error), "lora_path") from error

    async def unload(self, name: str) -> int:
        """Unload an adapter; returns how many requests are still to end with it."""
        if name not in self._client.adapters.folders:
            raise AdapterNotFound(f"there is no adapter {name!r:.200} here.", "lora_name")
        return await self._client.change_adapter(messages.UnloadAdapter(name))

    def _allowed(self, path: str) -> Path:
        """The folder, links followed; it and its files lie below one of the operator's."""
        if not self._roots:
            raise AdminOnly(
                "this server loads no adapters by the API. Start it with --lora-root DIR.",
                "lora_path",
            )
        try:
            folder = below(path, self._roots)
            inside = folder and all(below(str(folder / file), self._roots) for file in _FILES)
        except (OSError, ValueError, RuntimeError) as error:
            raise RequestError(f"lora_path is not a path: {error}.", "lora_path") from error
        if folder is None or not inside:
            raise AdminOnly(
                "lora_path is outside of the folders that this server allows (--lora-root), or "
                "leads there.",
                "lora_path",
            )
        return folder
