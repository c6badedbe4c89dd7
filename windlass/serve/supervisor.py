"""Supervises one engine process: starts it, watches it, and starts it again.

The supervisor notices a dead engine process at once and a hung one by its missing heartbeat. It
reports the process as unhealthy, ends it, and starts a new one with growing pauses and a limit.
It knows nothing of requests: client.py fails or resends those.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import zmq
import zmq.asyncio

from windlass.core.card import EngineReport
from windlass.errors import EngineError, WorkerDied
from windlass.serve import messages
from windlass.serve.health import Health, Heartbeat, RestartPolicy
from windlass.serve.loop import Build, Launch, Prepare
from windlass.serve.process import EngineProcess

_log = logging.getLogger("windlass.serve")

_DUMP_S = 0.3  # for a process that is about to be killed to dump its stacks


class EngineEvents(Protocol):
    """What the supervisor reports of its engine, in the event loop's thread."""

    def on_launch(self) -> None:
        """A process is being started; it counts from zero."""

    def on_ready(self, report: EngineReport) -> None:
        """The process accepts messages from now on."""

    def on_message(self, message: messages.FromEngine) -> None: ...

    def on_end(self, how: str, running: frozenset[bytes]) -> None:
        """The process died or hung while it ran the requests with these fingerprints."""

    def on_failed(self) -> None:
        """The engine is not restarted any more."""


@dataclass(frozen=True, slots=True)
class EngineLaunch:
    """How an engine process is started. `build` is pickled and called in the engine process.

    `build` None: `build_with` sets it later, while the process that `start` started runs `prepare`.
    """

    build: Build | None
    prepare: Prepare
    hang_timeout: float
    restarts: RestartPolicy


class EngineSupervisor:
    """Owns one engine process. One event loop, one thread. `label` begins its error messages."""

    def __init__(self, launch: EngineLaunch, events: EngineEvents, label: str = "") -> None:
        self._launch_options = launch
        self._events = events
        self._label = label
        self._build = launch.build
        self._build_known = asyncio.Event()
        if launch.build is not None:
            self._build_known.set()
        self._context: zmq.asyncio.Context | None = None
        self._path = Path()
        self._process: EngineProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._sleeping: asyncio.Event | None = None  # the process was stopped until this is set
        self._num_launches = 0
        self._heartbeat = Heartbeat(launch.hang_timeout)
        self._down = f"{label}the engine has not been started"
        self.has_failed = False  # the engine is not restarted any more

    # ---- start and end -----------------------------------------------------------------------

    async def start(self, context: zmq.asyncio.Context, path: Path) -> EngineReport:
        """Start the engine and wait until it is ready; raises the build's error.

        `path` is the first part of the names of its socket and its journal.
        """
        self._context, self._path = context, path
        report = await self._launch()
        self._task = asyncio.create_task(self._supervise())
        return report

    def build_with(self, build: Build) -> None:
        """Set the build function that was not known at construction."""
        self._build = build
        self._build_known.set()

    def set_hang_timeout(self, seconds: float) -> None:
        """Change the limit of silence of this process and of those started later."""
        self._launch_options = replace(self._launch_options, hang_timeout=seconds)
        self._heartbeat.set_timeout(seconds)

    async def _launch(self) -> EngineReport:
        assert self._context is not None
        self._num_launches += 1
        self._events.on_launch()
        path = self._path.with_name(f"{self._path.name}-{self._num_launches}")
        options = self._launch_options
        process = EngineProcess(
            self._context,
            Launch(f"ipc://{path}", path.with_suffix(".journal"), options.hang_timeout),
            prepare=options.prepare,
            handle=self._handle,
        )
        try:
            await self._build_known.wait()
            assert self._build is not None
            process.send_build(self._build)
            report = await process.ready()
        except BaseException:
            process.kill()
            await process.close()
            raise
        self._process = process
        self._heartbeat.heard()
        self._down = ""
        self._events.on_ready(report)
        return report

    def _handle(self, message: messages.FromEngine) -> None:
        self._heartbeat.heard()
        self._events.on_message(message)

    async def close(self) -> None:
        """Stop supervising and stop the process."""
        self._down = "the server is shutting down"
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._process is not None:
            await self._process.close()
            self._process = None

    def kill(self) -> None:
        """Kill the engine process."""
        if self._process is not None:
            self._process.kill()

    async def stop_process(self) -> None:
        """Stop the engine process until `start_process`; no request may be in flight."""
        process = self.running
        self._sleeping = asyncio.Event()
        self._down = "the engine process was stopped until the server is woken"
        self._process = None
        await process.close()

    async def start_process(self) -> None:
        """Start the engine again; on an error it stays stopped."""
        assert self._sleeping is not None
        await self._launch()
        self._sleeping.set()
        self._sleeping = None

    # ---- supervision -------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Restart the engine whenever it dies; returns when the restart policy is exhausted."""
        starts: deque[float] = deque()
        try:
            while self._process is not None:
                process = self._process
                how = await self._wait_for_end(process)
                if self._sleeping is not None:
                    await self._sleeping.wait()
                if self._process is not process:  # `start_process` has replaced it
                    continue
                self._process = None
                process.kill()
                self._down = f"{how}. It is being restarted"
                self._events.on_end(how, process.running())
                await process.close()
                await self._restart(how, starts)
        finally:
            self.has_failed = True
            self._events.on_failed()

    async def _wait_for_end(self, process: EngineProcess) -> str:
        """Wait until the process has died or its heartbeat is lost; returns a description."""
        heartbeat = self._heartbeat
        was_late = False
        ended = asyncio.create_task(process.ended())
        try:
            while True:
                await asyncio.wait({ended}, timeout=heartbeat.interval_s)
                heartbeat.tick()
                hung = f"{self._label}the engine hung (no heartbeat for {heartbeat.silent_s:.1f} s)"
                if ended.done():
                    how = process.describe_exit()
                    return f"{hung}; {how}" if heartbeat.is_late else self._label + how
                if heartbeat.is_lost and self._sleeping is None:
                    process.resume()  # a stopped process dumps its stacks now
                    await asyncio.wait({ended}, timeout=_DUMP_S)
                    return f"{hung} and was killed"
                if heartbeat.is_late and not was_late and self._sleeping is None:
                    _log.error("%s; its stacks follow", hung)
                    await process.dump_stacks()
                was_late = heartbeat.is_late
        finally:
            ended.cancel()

    async def _restart(self, how: str, starts: deque[float]) -> None:
        """Restart the engine as often as the policy allows; `starts` are the times of recent restarts."""
        policy = self._launch_options.restarts
        while self._process is None:
            now = time.monotonic()
            while starts and now - starts[0] > policy.window_s:
                starts.popleft()
            if len(starts) >= policy.max_restarts:
                self._down = (
                    f"{how}; it was restarted {len(starts)} times and is not restarted again"
                )
                _log.error("%s", self._down)
                return
            pause = min(policy.first_pause_s * 2 ** len(starts), policy.max_pause_s)
            starts.append(now)
            _log.error("%s; restarting it in %.1f s", how, pause)
            await asyncio.sleep(pause)
            try:
                await self._launch()
            except (EngineError, OSError, zmq.ZMQError) as error:
                how = f"{self._label}the engine could not be restarted: {error}"
            else:
                seconds = time.monotonic() - now
                _log.info("%sthe engine is up again, after %.1f s", self._label, seconds)

    # ---- state -------------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """The engine's process id; None while no process runs."""
        return self._process.pid if self._process is not None else None

    @property
    def process(self) -> EngineProcess | None:
        """The process, also while it hangs; None while no process runs."""
        return self._process

    @property
    def running(self) -> EngineProcess:
        """The process; raises WorkerDied while it is down or hangs."""
        self.check_running()
        assert self._process is not None
        return self._process

    def check_running(self) -> None:
        """Raise WorkerDied unless the engine would answer now."""
        health = self.health()
        if not health.ok:
            raise WorkerDied(f"{health.reason}. Try again in a moment.")

    def health(self) -> Health:
        """Whether the engine would answer a request now, and the reason if not."""
        if self._process is None:
            return Health(False, self._down)
        if self._heartbeat.is_late:
            silent_s = self._heartbeat.silent_s
            return Health(
                False, f"{self._label}the engine hangs: no heartbeat for {silent_s:.1f} s"
            )
        return Health(True)

    def expect_silence(self) -> AbstractContextManager[None]:
        """Expect no heartbeat during a slow operation of the engine."""
        return self._heartbeat.paused()
