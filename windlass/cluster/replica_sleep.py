"""The sleep of a replica in the warm pool: it releases its memory when idle, and a request wakes it.

warm_pool.py decides which sleeping replicas stay; Serve stops the others.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable

from windlass.errors import EngineError
from windlass.serve.handle import EngineHandle
from windlass.serve.sleep import EngineSleep

_log = logging.getLogger("windlass.cluster")

_DEFAULT_WAKE_S = 5.0  # until a wake was measured
_POLL_S = 0.5


class ReplicaSleep:
    """Owns the sleep state of one engine. One event loop."""

    def __init__(self, client: EngineHandle, is_busy: Callable[[], bool]) -> None:
        self._client = client
        self._is_busy = is_busy
        self._engine = EngineSleep([client])
        self._lock = asyncio.Lock()
        self._used_at = time.monotonic()
        self._wake_s = _DEFAULT_WAKE_S
        self._awake_bytes = 0
        self.asleep_bytes: int | None = None  # None: it has not slept yet
        self.idle_s = math.inf  # without requests, until it sleeps
        self._task = asyncio.create_task(self._sleep_when_idle())

    @property
    def is_asleep(self) -> bool:
        return self._engine.level > 0

    def used(self) -> None:
        """A request has ended."""
        self._used_at = time.monotonic()

    def metrics(self) -> dict[str, float]:
        """For the warm pool; serve_policy.py has the names."""
        asleep_bytes = self._awake_bytes if self.asleep_bytes is None else self.asleep_bytes
        return {
            "is_asleep": float(self.is_asleep),
            "awake_bytes": float(self._awake_bytes),
            "asleep_bytes": float(asleep_bytes),
            "wake_s": self._wake_s,
        }

    async def measure(self) -> None:
        """Measure the memory of the engine that is awake."""
        self._awake_bytes = await self._num_bytes()

    async def _num_bytes(self) -> int:
        """The bytes of the engine, where its runner reports them."""
        (memory,) = (await self._client.memory()).values()
        return 0 if memory.held is None else memory.held.total

    async def _sleep_when_idle(self) -> None:
        while True:
            await asyncio.sleep(min(_POLL_S, self.idle_s))
            is_idle = time.monotonic() - self._used_at >= self.idle_s
            if not is_idle or self.is_asleep or not self._client.health().ok:
                continue
            async with self._lock:
                if not self._is_busy():
                    try:
                        await self._sleep()
                    except EngineError as error:  # the engine has ended: it is restarted, awake
                        _log.warning("the replica stays awake: %s", error)
                        self.used()

    async def _sleep(self) -> None:
        self._awake_bytes = await self._num_bytes()
        await self._engine.sleep(1)
        self.asleep_bytes = await self._num_bytes() if self._engine.level == 1 else 0

    async def wake(self) -> None:
        """Wake the engine; returns when it takes requests."""
        if not self.is_asleep and not self._lock.locked():
            return
        async with self._lock:
            if self.is_asleep:
                began = time.monotonic()
                await self._engine.wake()
                self._wake_s = time.monotonic() - began

    def close(self) -> None:
        self._task.cancel()
