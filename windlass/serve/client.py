"""The server's hold on the engine: requests in, outputs out, health, and restarts.

A dead engine process is noticed at once, a hung one by its missing heartbeat: its requests end with
an error, health turns red, and a new process is started, with growing pauses and not for ever.
quarantine.py decides which requests may run again. This file does not know HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import zmq
import zmq.asyncio

from windlass.core.card import EngineReport
from windlass.core.memory import Memory
from windlass.core.trace import RequestTrace
from windlass.core.types import EngineStats, NewRequest, Output
from windlass.errors import EngineError, RequestError, WorkerDied
from windlass.serve import messages
from windlass.serve.adapters import AdapterRegistry, Change
from windlass.serve.calls import Calls
from windlass.serve.inbox import Inbox
from windlass.serve.loop import Build, Launch, Prepare
from windlass.serve.process import EngineProcess, build_error, refusal_error
from windlass.serve.quarantine import Quarantine, fingerprint
from windlass.serve.states import Backlog as Backlog
from windlass.serve.states import Health as Health
from windlass.serve.states import Heartbeat
from windlass.serve.states import RestartPolicy as RestartPolicy

T = TypeVar("T", bound=messages.Answer)

_log = logging.getLogger("windlass.serve")

_ANSWER_TIMEOUT_S = 10.0
_REST_TIMEOUT_S = 600.0  # weights may be many, and a disk slow


def _no_preparation() -> None:
    """What is built needs nothing that is slow to import."""


class EngineClient:
    """Owns the engine process and the requests in flight. One event loop, one thread.

    `build` is pickled and called in the engine's process; it returns the engine and its report.
    None: `build_with` will tell, while the process that `start` started is busy with `prepare`.
    """

    def __init__(
        self,
        build: Build | None,
        hang_timeout: float = 120.0,
        restarts: RestartPolicy | None = None,
        prepare: Prepare = _no_preparation,
    ) -> None:
        self._prepare = prepare
        self._build = build
        self._known = asyncio.Event()
        if build is not None:
            self._known.set()
        self._hang_timeout = hang_timeout
        self._restarts = restarts or RestartPolicy()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._context: zmq.asyncio.Context | None = None
        self._process: EngineProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._report: EngineReport | None = None
        self._inboxes: dict[str, Inbox] = {}
        self._calls = Calls()
        self._sleeping: asyncio.Event | None = None  # its process was ended, until this is set
        self._lives = 0
        self._heartbeat = Heartbeat(hang_timeout)
        self._quarantine = Quarantine()
        self._down = "the engine has not been started"
        # Requests that were sent since the engine started, by number, until it has seen them.
        self._num_sent = 0
        self._unseen: deque[int] = deque()  # their prompt lengths
        self.stats = EngineStats()
        self.adapters = AdapterRegistry()
        self.num_finished = 0
        self.failed = asyncio.Event()  # set when the engine is down for good
        # Told of each report and of the one before it in the same life of the engine.
        self.on_stats: Callable[[EngineStats, EngineStats], None] | None = None
        # Told of requests that have ended; None: those in the engine died with it.
        self.on_traces: Callable[[list[RequestTrace] | None], None] | None = None

    # ---- the process -------------------------------------------------------------------------

    async def start(self) -> EngineReport:
        """Start the engine and wait until it can work; raises what its build raised."""
        self._folder = tempfile.TemporaryDirectory(prefix="windlass-")
        self._context = zmq.asyncio.Context()
        report = await self._launch()
        self._supervisor = asyncio.create_task(self._supervise())
        return report

    def build_with(self, build: Build) -> None:
        """Say what to build, when that was not known at first."""
        self._build = build
        self._known.set()

    async def _launch(self) -> EngineReport:
        assert self._folder is not None
        assert self._context is not None
        self._lives += 1
        self._num_sent = 0
        self._unseen.clear()
        self.stats = EngineStats()
        path = Path(self._folder.name) / f"engine-{self._lives}"
        launch = Launch(f"ipc://{path}", path.with_suffix(".journal"), self._hang_timeout)
        process = EngineProcess(self._context, launch, self._prepare, self._handle)
        try:
            await self._known.wait()
            assert self._build is not None
            process.begin(self._build)
            self._report = await process.ready()
        except BaseException:
            process.kill()
            await process.close()
            raise
        self._process = process
        for change in self.adapters.restarted(self._report.adapters):
            process.send(change)
        self._heartbeat.heard()
        self._down = ""
        return self._report

    async def _supervise(self) -> None:
        """Wait for the engine to die, answer its requests, start it again; return to give up."""
        starts: deque[float] = deque()
        try:
            while self._process is not None:
                process = self._process
                how = await self._end_of(process)
                if self._sleeping is not None:
                    await self._sleeping.wait()
                if self._process is not process:  # it was ended on purpose, and started again
                    continue
                self._process = None
                process.kill()
                self._end_all(how, process.running())
                await process.close()
                await self._restart(how, starts)
        finally:
            self.failed.set()

    async def _end_of(self, process: EngineProcess) -> str:
        """Wait until the process has died, or has been silent for too long; returns which."""
        heartbeat = self._heartbeat
        ended = asyncio.create_task(process.ended())
        try:
            while True:
                await asyncio.wait({ended}, timeout=heartbeat.interval_s or None)
                heartbeat.tick()
                hung = f"the engine hung (no heartbeat for {heartbeat.silent_s:.1f} s)"
                if ended.done():
                    how = process.how_it_ended()
                    return f"{hung}; {how}" if heartbeat.is_late else how
                if heartbeat.is_lost and self._sleeping is None:
                    return f"{hung} and was killed"
        finally:
            ended.cancel()

    async def _restart(self, how: str, starts: deque[float]) -> None:
        """Start the engine again, as often as the policy allows; `starts` are the latest times."""
        policy = self._restarts
        while self._process is None:
            now = time.monotonic()
            while starts and now - starts[0] > policy.window_s:
                starts.popleft()
            if len(starts) >= policy.max_restarts:
                self._down = f"{how}; it was started again {len(starts)} times and is given up"
                _log.error("%s", self._down)
                return
            pause = min(policy.first_pause_s * 2 ** len(starts), policy.max_pause_s)
            starts.append(now)
            _log.error("%s; starting it again in %.1f s", how, pause)
            await asyncio.sleep(pause)
            try:
                await self._launch()
            except (EngineError, OSError, zmq.ZMQError) as error:
                how = f"the engine could not be started again: {error}"

    def _end_all(self, how: str, running: frozenset[bytes]) -> None:
        """Answer all requests of an engine that is gone; `running` are those it worked on."""
        self._down = f"{how}. It is being started again"
        quarantine = self._quarantine
        quarantine.strike(running, how)
        started = quarantine.in_flight(running)
        blocked = quarantine.blocked_in_flight()
        quarantine.engine_ended()
        _log.error("%s; %d requests were running", how, len(started))
        for request_id in blocked:
            _log.error("request %s is blocked: the engine failed again while it ran", request_id)
        for inbox in self._open_inboxes():
            inbox.put(_end_error(inbox, how, started, blocked))
        self._calls.fail(how)
        self.adapters.fail(how)
        if self.on_traces is not None:
            self.on_traces(None)

    async def close(self) -> None:
        """End the engine process; requests still in flight end with an error."""
        self._down = "the server is shutting down"
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait({self._supervisor})
        self.abort_all(WorkerDied("the server is shutting down."))
        if self._process is not None:
            await self._process.close()
            self._process = None
        if self._context is not None:
            self._context.destroy(linger=0)
        if self._folder is not None:
            self._folder.cleanup()

    def kill(self) -> None:
        """End the engine process without asking."""
        if self._process is not None:
            self._process.kill()

    # ---- requests ----------------------------------------------------------------------------

    async def generate(
        self, *requests: NewRequest, tracked: bool = True
    ) -> AsyncGenerator[Output, None]:
        """Yield the outputs of all `requests` as they come; close it to abort those still open.

        An error of one is raised and ends all. An output's `request_id` says whose it is.
        """
        inbox = self.submit(requests, tracked)
        try:
            while (output := await self.next(inbox)) is not None:
                yield output
        finally:
            self.drop(inbox)

    async def next(self, inbox: Inbox) -> Output | None:
        """The next output of its requests; None: all have ended. An error of one is raised."""
        while inbox.open_ids:
            item = await inbox.get()
            if isinstance(item, EngineError):
                raise item
            if item.request_id not in inbox.open_ids:
                continue
            if item.finish is not None:
                self._forget(item.request_id, completed=item.finish in ("stop", "length"))
                if item.finish in ("error", "abort"):
                    raise item.exception()
            return item
        return None

    def drop(self, inbox: Inbox) -> None:
        """Abort those of its requests that are open."""
        for request_id in list(inbox.open_ids):
            self.abort(request_id)

    def submit(self, requests: Sequence[NewRequest], tracked: bool = True) -> Inbox:
        """Send requests to the engine; `next` gives their outputs, and `drop` must come last.

        Requests that are not `tracked` are never blocked: the server's own probes.
        """
        process = self._running
        for request in requests:
            if request.request_id in self._inboxes:
                raise RequestError(
                    f"request_id {request.request_id!r} is in use by a running request.",
                    "request_id",
                )
        adds = [
            messages.Add(request, fingerprint(request) if tracked else b"") for request in requests
        ]
        self._quarantine.check(add.fingerprint for add in adds)
        inbox = Inbox(request.request_id for request in requests)
        for request in requests:
            self._inboxes[request.request_id] = inbox
        self._send_adds(process, [add for add in adds if self._quarantine.enter(add)])
        return inbox

    def _send_adds(self, process: EngineProcess, adds: list[messages.Add]) -> None:
        if adds:
            self._num_sent += len(adds)
            self._unseen.extend(len(add.request.prompt) for add in adds)
            process.send(*adds)

    def abort(self, request_id: str, completed: bool = False) -> None:
        """Drop one request; nothing more comes from it. Unknown ids are nothing to do.

        `completed`: the caller has all of the output that it needs, so the request did no harm.
        """
        inbox = self._inboxes.get(request_id)
        if inbox is None:
            return
        if self._process is not None and not self._quarantine.is_held(request_id):
            self._process.send(messages.Abort(request_id))
        self._forget(request_id, completed)
        inbox.put(Output(request_id, finish="abort"))  # wakes who waits for it

    def abort_all(self, error: EngineError) -> None:
        """End every request in flight with `error`."""
        for inbox in self._open_inboxes():
            inbox.put(error)

    def _open_inboxes(self) -> list[Inbox]:
        return list({id(inbox): inbox for inbox in self._inboxes.values()}.values())

    def _forget(self, request_id: str, completed: bool) -> None:
        inbox = self._inboxes.pop(request_id)
        inbox.open_ids.discard(request_id)
        self.num_finished += 1
        released = self._quarantine.leave(request_id, completed)
        if self._process is not None:
            self._send_adds(self._process, released)

    async def reset_prefix_cache(self) -> int:
        """Forget cached blocks that nobody uses; returns how many."""
        answer = await self._ask(messages.ResetPrefixCache, messages.CacheReset)
        return answer.num_blocks

    async def trace(self, request_id: str) -> RequestTrace | None:
        """What is to be told so far of a request; None: it has ended."""
        answer = await self._ask(
            partial(messages.GetTrace, request_id=request_id), messages.TraceReply
        )
        return answer.trace

    async def memory(self) -> Memory:
        """What the engine's memory holds at this moment."""
        return (await self._ask(messages.GetMemory, messages.MemoryReply)).memory

    async def sleep(self) -> None:
        """Let the engine give memory back and stay; nothing may be in flight."""
        await self._told(messages.Sleep)

    async def wake(self) -> None:
        """Undo `sleep`; an engine that was started again since is awake already."""
        await self._told(messages.Wake)

    async def _told(self, question: type[messages.Sleep] | type[messages.Wake]) -> None:
        with self._heartbeat.paused():
            answer = await self._ask(question, messages.MemoryReply, _REST_TIMEOUT_S)
        if answer.kind:
            raise build_error(answer.kind, answer.message)

    async def end_process(self) -> None:
        """End the engine's process until `begin_process`; nothing may be in flight."""
        process = self._running
        self._sleeping = asyncio.Event()
        self._down = "the engine's process was ended until it is woken"
        self._process = None
        self._calls.fail(self._down)
        await process.close()

    async def begin_process(self) -> None:
        """Start the engine again; raises what keeps it from it, and then it still rests."""
        assert self._sleeping is not None
        await self._launch()
        self._sleeping.set()
        self._sleeping = None

    async def _ask(
        self,
        question: Callable[[int], messages.Question],
        kind: type[T],
        timeout_s: float = _ANSWER_TIMEOUT_S,
    ) -> T:
        return await self._calls.ask(question, kind, self._running.send, timeout_s)

    @property
    def _running(self) -> EngineProcess:
        if self._process is None:
            raise WorkerDied(f"{self._down}. Try again in a moment.")
        if self._heartbeat.is_late:
            raise WorkerDied(f"{self._silence}. Try again in a moment.")
        return self._process

    async def change_adapter(self, change: Change) -> int:
        """Load or unload an adapter; returns how many requests are still to end with it."""
        return await self.adapters.change(change, self._running.send)

    def _handle(self, message: messages.FromEngine) -> None:
        self._heartbeat.heard()
        match message:
            case messages.Outputs(outputs):
                inboxes = self._inboxes
                for output in outputs:
                    inbox = inboxes.get(output.request_id)
                    if inbox is not None:  # else it was aborted, and the engine did not know yet
                        inbox.put(output)
            case messages.Refused(request_id, kind, text, param):
                if (asked := self._inboxes.get(request_id)) is not None:
                    asked.put(refusal_error(kind, text, param))
            case messages.StepFailed(fingerprints, error):
                self._step_failed(fingerprints, error)
            case messages.Stats(stats, num_adds):
                self._see(stats, num_adds)
            case messages.AdapterAnswer():
                self.adapters.answered(message)
            case messages.Traces(traces):
                if self.on_traces is not None:
                    self.on_traces(traces)
            case messages.CacheReset() | messages.TraceReply() | messages.MemoryReply():
                self._calls.answered(message)

    def _step_failed(self, running: list[bytes], error: str) -> None:
        """Strike the requests of a step that raised; the engine answers those it has itself."""
        self._quarantine.strike(running, f"a step failed with {error}")
        for request_id, blocked in self._quarantine.blocked_in_flight().items():
            if self._quarantine.is_held(request_id):
                self._inboxes[request_id].put(blocked)

    def _see(self, stats: EngineStats, num_adds: int) -> None:
        last, self.stats = self.stats, stats
        while len(self._unseen) > self._num_sent - num_adds:
            self._unseen.popleft()
        if self.on_stats is not None:
            self.on_stats(stats, last)

    # ---- what others ask ---------------------------------------------------------------------

    @property
    def report(self) -> EngineReport:
        """What the engine said of itself when it was last started."""
        if self._report is None:
            raise EngineError(self._down)
        return self._report

    @property
    def pid(self) -> int | None:
        """The engine's process id; None while there is none."""
        return self._process.pid if self._process is not None else None

    @property
    def num_in_flight(self) -> int:
        return len(self._inboxes)

    @property
    def backlog(self) -> Backlog:
        stats = self.stats
        unseen = sum(self._unseen) + self._quarantine.num_held_tokens
        return Backlog(
            stats.num_running,
            stats.num_waiting,
            len(self._unseen) + self._quarantine.num_held,
            stats.num_waiting_tokens + unseen,
        )

    @property
    def _silence(self) -> str:
        return f"the engine hangs: no heartbeat for {self._heartbeat.silent_s:.1f} s"

    def health(self) -> Health:
        """Whether requests would be answered now, and if not, why."""
        if self._process is None:
            return Health(False, self._down)
        if self._heartbeat.is_late:
            return Health(False, self._silence)
        return Health(True)


def _end_error(
    inbox: Inbox, how: str, started: set[str], blocked: Mapping[str, EngineError]
) -> EngineError:
    """What the requests of an inbox are told when their engine is gone."""
    for request_id in inbox.open_ids & blocked.keys():
        return blocked[request_id]
    if inbox.open_ids & started:
        return WorkerDied(
            f"{how} while this request was running. Send it again; if the engine fails once more "
            "while it runs, it will be blocked."
        )
    return WorkerDied(f"{how} before this request was started. Send it again.")
