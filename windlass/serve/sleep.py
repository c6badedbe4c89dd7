"""A server that sleeps: it takes no requests, and its memory is given back until it is woken.

Level 1 keeps the engine's process, with its weights in a file. Level 2 ends the process, and so does
level 1 where memory cannot be had back otherwise (on a GPU); the answer says what was done.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Literal

from windlass.errors import UnsupportedError, WorkerDied
from windlass.serve.client import EngineClient
from windlass.serve.desk import Desk
from windlass.serve.problems import Busy, Sleeping

Mode = Literal["wait", "refuse", "abort"]
State = Literal["awake", "falling asleep", "sleeping", "waking"]

_FIRST_GUESS_S = 5.0


@dataclass(frozen=True, slots=True)
class Slept:
    """What was done. `level` 0: it is awake."""

    level: int
    seconds: float
    reason: str = ""  # why another level than asked for


class Sleeper:
    """Owns the state. One change at a time; who asks meanwhile waits for it."""

    def __init__(self, client: EngineClient, desk: Desk) -> None:
        self._client = client
        self._desk = desk
        self._turn = asyncio.Lock()
        self._wake_s = _FIRST_GUESS_S  # how long it takes: guessed, then as it took
        self.state: State = "awake"
        self.level = 0
        desk.closed = self._closed

    def _closed(self) -> None:
        """Raise while nothing is taken."""
        if self.state != "awake":
            raise Sleeping(
                f"the server is {self.state} and takes no requests. POST /admin/wake wakes it.",
                self._wake_s,
            )

    async def sleep(self, level: int, mode: Mode, timeout_s: float) -> Slept:
        """Let running requests end, refuse because of them, or abort them; then sleep."""
        async with self._turn:
            if self.level >= level:
                return Slept(self.level, 0.0, "it sleeps already")
            began = time.monotonic()
            self.state = "falling asleep"
            try:
                if self.level == 0:
                    await self._settle(mode, timeout_s)
                self.level, reason = await self._lie_down(level)
            finally:
                self.state = "sleeping" if self.level else "awake"
            return Slept(self.level, time.monotonic() - began, reason)

    async def _settle(self, mode: Mode, timeout_s: float) -> None:
        running = self._desk.num_in_flight
        if mode == "refuse" and running:
            raise Busy(f"{running} requests are running; the server cannot sleep now.")
        if mode == "abort":
            self._client.abort_all(WorkerDied("the server was told to sleep at once."))
        if not await self._desk.idle(timeout_s):
            raise Busy(
                f"{self._desk.num_in_flight} requests have not ended in {timeout_s:g} s; the "
                "server stays awake. Give more time, or abort them with mode=abort."
            )

    async def _lie_down(self, level: int) -> tuple[int, str]:
        """The level that was reached, and why that one."""
        if level == 1:
            try:
                await self._client.sleep()
                return 1, ""
            except UnsupportedError as error:
                reason = f"the engine's process was ended: {error}"
        else:
            reason = ""
        await self._client.end_process()
        return 2, reason

    async def wake(self) -> Slept:
        """Have the memory again and take requests; one that is awake stays so."""
        async with self._turn:
            began = time.monotonic()
            if self.level == 0:
                return Slept(0, 0.0, "it is awake")
            self.state = "waking"
            try:
                if self.level == 1:
                    await self._client.wake()
                else:
                    await self._client.begin_process()
                self.level = 0
            finally:
                self.state = "sleeping" if self.level else "awake"
            self._wake_s = time.monotonic() - began
            return Slept(0, self._wake_s)
