"""Sleep mode: the server refuses requests and releases its memory until it is woken.

Level 1 keeps the engine process and moves its weights to a file. Level 2 stops the process. Level 1
also stops it where its memory cannot be released otherwise (on a GPU); the result says so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from windlass.errors import UnsupportedError, WorkerDied
from windlass.serve.desk import Desk
from windlass.serve.handle import EngineHandle
from windlass.serve.problems import Busy, Sleeping

Mode = Literal["wait", "refuse", "abort"]
State = Literal["awake", "falling asleep", "sleeping", "waking"]

_DEFAULT_WAKE_S = 5.0


@dataclass(frozen=True, slots=True)
class SleepResult:
    """The level reached; 0: awake."""

    level: int
    seconds: float
    reason: str = ""  # why the level differs from the requested one


class EngineSleep:
    """Owns the sleep level of some engines, which sleep and wake together; 0: they are awake."""

    def __init__(self, clients: Sequence[EngineHandle]) -> None:
        self._clients = clients
        self.level = 0

    async def sleep(self, level: int) -> str:
        """Sleep at `level`; returns why the level reached differs. No request may be in flight."""
        reason = ""
        if level == 1:
            try:
                await self._each(_sleep, undo=_wake)
            except UnsupportedError as error:
                level, reason = 2, f"the engine process was stopped: {error}"
        if level == 2:
            await self._each(_stop, undo=_start)
        self.level = level
        return reason

    async def wake(self) -> None:
        if self.level == 1:
            await self._each(_wake, undo=_sleep)
        elif self.level == 2:
            await self._each(_start, undo=_stop)
        self.level = 0

    async def _each(
        self,
        call: Callable[[EngineHandle], Coroutine[Any, Any, None]],
        undo: Callable[[EngineHandle], Coroutine[Any, Any, None]],
    ) -> None:
        """Call the engines one after the other; if one raises, undo those before it."""
        for index, client in enumerate(self._clients):
            try:
                await call(client)
            except BaseException:
                for done in self._clients[:index]:
                    await undo(done)
                raise


class Sleeper:
    """Owns the sleep state. Changes run one at a time; concurrent callers wait."""

    def __init__(self, clients: Sequence[EngineHandle], desk: Desk) -> None:
        """`clients`: the engines of all models, which sleep and wake together."""
        self._clients = clients
        self._engines = EngineSleep(clients)
        self._desk = desk
        self._lock = asyncio.Lock()
        self._wake_s = _DEFAULT_WAKE_S  # for Retry-After: a default, then the last measured time
        self.state: State = "awake"
        desk.check_awake = self._check_awake

    @property
    def level(self) -> int:
        return self._engines.level

    def _check_awake(self) -> None:
        """Raise Sleeping unless the server is awake."""
        if self.state != "awake":
            raise Sleeping(
                f"the server is {self.state} and accepts no requests. POST /admin/wake wakes it.",
                self._wake_s,
            )

    async def sleep(self, level: int, mode: Mode, timeout_s: float) -> SleepResult:
        """Wait for running requests, refuse because of them, or abort them; then sleep."""
        async with self._lock:
            if self.level >= level:
                return SleepResult(self.level, 0.0, "the server sleeps already")
            began = time.monotonic()
            self.state = "falling asleep"
            try:
                if self.level == 0:
                    await self._wait_for_requests(mode, timeout_s)
                reason = await self._engines.sleep(level)
            finally:
                self.state = "sleeping" if self.level else "awake"
            return SleepResult(self.level, time.monotonic() - began, reason)

    async def _wait_for_requests(self, mode: Mode, timeout_s: float) -> None:
        running = self._desk.num_in_flight
        if mode == "refuse" and running:
            raise Busy(f"{running} requests are running; the server cannot sleep now.")
        if mode == "abort":
            for client in self._clients:
                client.abort_all(
                    WorkerDied("the server was put to sleep; this request was aborted.")
                )
        if not await self._desk.idle(timeout_s):
            raise Busy(
                f"{self._desk.num_in_flight} requests have not ended in {timeout_s:g} s; the "
                "server stays awake. Give more time, or abort them with mode=abort."
            )

    async def wake(self) -> SleepResult:
        """Restore the memory and accept requests; does nothing if the server is awake."""
        async with self._lock:
            began = time.monotonic()
            if self.level == 0:
                return SleepResult(0, 0.0, "the server is awake")
            self.state = "waking"
            try:
                await self._engines.wake()
            finally:
                self.state = "sleeping" if self.level else "awake"
            self._wake_s = time.monotonic() - began
            return SleepResult(0, self._wake_s)


async def _stop(client: EngineHandle) -> None:
    await client.stop_process()


async def _start(client: EngineHandle) -> None:
    await client.start_process()


async def _sleep(client: EngineHandle) -> None:
    await client.sleep()


async def _wake(client: EngineHandle) -> None:
    await client.wake()
