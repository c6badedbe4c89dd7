"""Loads and unloads LoRA adapters through the API.

An adapter must lie below one of the operator's folders (--lora-root). The check here gives a clear error;
the engine opens no file outside of them, also when a link changes later (lora/open_below.py). Callers check
the admin key.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from windlass.errors import (
    AdapterConflict,
    AdapterNotFound,
    CheckpointError,
    ConfigError,
    RequestError,
    UnsupportedError,
)
from windlass.lora_config import below, check_adapter_name
from windlass.serve import messages
from windlass.serve.handle import EngineHandle
from windlass.serve.problems import AdminOnly

_FILES = ("adapter_config.json", "adapter_model.safetensors")


class AdapterManager:
    """Checks an adapter's name and folder before the engine gets them."""

    def __init__(
        self, client: EngineHandle, roots: tuple[str, ...], base_names: tuple[str, ...]
    ) -> None:
        self._client = client
        self._roots = tuple(str(Path(root).absolute()) for root in roots)
        self._base_names = base_names

    async def load(self, name: str, path: str) -> None:
        """Load an adapter; on an error nothing of it stays loaded."""
        try:
            check_adapter_name(name)
        except ConfigError as error:
            raise RequestError(f"lora_name: {error}", "lora_name") from error
        if name in self._base_names:
            raise AdapterConflict(f"{name!r} is a name of the base model.", "lora_name")
        self._client.adapters.check_free(name)
        folder = await asyncio.to_thread(self._allowed_folder, path)
        try:
            await self._client.change_adapter(messages.LoadAdapter(name, str(folder), self._roots))
        except (CheckpointError, UnsupportedError) as error:
            raise RequestError(str(error), "lora_path") from error

    async def unload(self, name: str) -> int:
        """Unload an adapter; returns the number of running requests that still use it."""
        if name not in self._client.adapters.folders:
            raise AdapterNotFound(f"there is no adapter {name!r:.200} here.", "lora_name")
        return await self._client.change_adapter(messages.UnloadAdapter(name))

    def _allowed_folder(self, path: str) -> Path:
        """Resolve links; the folder and its files must lie below one of the operator's folders."""
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
                "links to a file outside of them.",
                "lora_path",
            )
        return folder
