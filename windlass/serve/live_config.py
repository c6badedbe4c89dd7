"""The current config of a running server.

A config is never changed in place: `PATCH /admin/config` (config_admin.py) replaces it whole, so no
reader sees half a change. A setting that is marked live must be read from here at each use.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from windlass.config import EngineConfig, ServeConfig

Apply = Callable[[ServeConfig], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartConfig:
    """How a server was started: its engine, and the source of each option: flag, file or environment."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    sources: Mapping[str, str] = field(default_factory=dict)


class LiveConfig:
    """Owns the current config of one process. Read `value` once to read several settings together."""

    def __init__(self, value: ServeConfig) -> None:
        self.value = value
        self._watchers: list[Apply] = []
        self._changed = asyncio.Event()

    def watch(self, apply: Apply) -> None:
        """Call `apply` with the current config now and with each later one; it must not raise."""
        self._watchers.append(apply)
        apply(self.value)

    def set(self, value: ServeConfig) -> None:
        """Replace the config. Call it in the event loop."""
        self.value = value
        for apply in self._watchers:
            apply(value)
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, timeout_s: float | None) -> bool:
        """Wait for the next change; False: none came in `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self._changed.wait(), timeout_s)
        return False
