"""The HTTP process's client of the engine process: requests, outputs and calls.

supervisor.py starts, watches and restarts the process; the client fails the requests of a process
that ended. quarantine.py decides which requests may run again. This module does not know HTTP.
"""

from __future__ import annotations

import logging
import tempfile
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
from windlass.serve.adapter_registry import AdapterRegistry, Change
from windlass.serve.health import Backlog, Health, RestartPolicy
from windlass.serve.inbox import Inbox
from windlass.serve.loop import Build, Prepare
from windlass.serve.process import EngineProcess, build_error, refusal_error
from windlass.serve.quarantine import Quarantine, fingerprint
from windlass.serve.rpc import PendingCalls
from windlass.serve.supervisor import EngineLaunch, EngineSupervisor

T = TypeVar("T", bound=messages.Reply)

_log = logging.getLogger("windlass.serve")

_REPLY_TIMEOUT_S = 10.0
_SLEEP_TIMEOUT_S = 600.0  # weights may be large, and a disk slow


def _no_preparation() -> None:
    """Do nothing: the build needs no slow imports."""


class EngineClient:
    """Owns the engine process and the requests in flight. One event loop, one thread.

    `build` is pickled and called in the engine process; it returns the engine and its report.
    None: `build_with` sets it later, while the process that `start` started runs `prepare`.
    """

    def __init__(
        self,
        build: Build | None,
        hang_timeout: float = 120.0,
        restarts: RestartPolicy | None = None,
        prepare: Prepare = _no_preparation,
    ) -> None:
        launch = EngineLaunch(build, prepare, hang_timeout, restarts or RestartPolicy())
        self._supervisor = EngineSupervisor(launch, self)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._context: zmq.asyncio.Context | None = None
        self._report: EngineReport | None = None
        self._inboxes: dict[str, Inbox] = {}
        self._pending_calls = PendingCalls()
        self._quarantine = Quarantine()
        # Requests sent to this engine process, and those that it has not reported as received.
        self._num_sent = 0
        self._unseen: deque[int] = deque()  # prompt lengths
        self.stats = EngineStats()
        self.adapters = AdapterRegistry()
        self.num_finished = 0
        self.failed = self._supervisor.failed
        # Called with the current and the previous stats of one engine process.
        self.on_stats: Callable[[EngineStats, EngineStats], None] | None = None
        # Called with the traces of ended requests; None: the engine died with those it had.
        self.on_traces: Callable[[list[RequestTrace] | None], None] | None = None

    # ---- process -----------------------------------------------------------------------------

    async def start(self) -> EngineReport:
        """Start the engine and wait until it is ready; raises the build's error."""
        self._folder = tempfile.TemporaryDirectory(prefix="windlass-")
        self._context = zmq.asyncio.Context()
        return await self._supervisor.start(self._context, Path(self._folder.name) / "engine")

    def build_with(self, build: Build) -> None:
        """Set the build function that was not known at construction."""
        self._supervisor.build_with(build)

    async def close(self) -> None:
        """Stop the engine process; requests still in flight end with an error."""
        self.abort_all(WorkerDied("the server is shutting down."))
        await self._supervisor.close()
        if self._context is not None:
            self._context.destroy(linger=0)
        if self._folder is not None:
            self._folder.cleanup()

    def kill(self) -> None:
        """Kill the engine process."""
        self._supervisor.kill()

    def on_launch(self) -> None:
        self._num_sent = 0
        self._unseen.clear()
        self.stats = EngineStats()

    def on_ready(self, report: EngineReport) -> None:
        self._report = report
        for change in self.adapters.sync_after_start(report.adapters):
            self._supervisor.running.send(change)

    def on_end(self, how: str, running: frozenset[bytes]) -> None:
        """Fail all requests of a dead engine."""
        quarantine = self._quarantine
        quarantine.strike(running, how)
        started = quarantine.in_flight(running)
        blocked = quarantine.blocked_in_flight()
        quarantine.engine_ended()
        _log.error("%s; %d requests were running", how, len(started))
        for request_id in blocked:
            _log.error("request %s is blocked: the engine failed again while it ran", request_id)
        for inbox in self._open_inboxes():
            inbox.put(_end_error(inbox, how, started=started, blocked=blocked))
        self._pending_calls.fail(how)
        self.adapters.fail(how)
        if self.on_traces is not None:
            self.on_traces(None)

    # ---- requests ----------------------------------------------------------------------------

    async def generate(
        self, *requests: NewRequest, tracked: bool = True
    ) -> AsyncGenerator[Output, None]:
        """Yield the outputs of all `requests`; closing the generator aborts the unfinished ones.

        An error of one request is raised and ends all. `Output.request_id` identifies the request.
        """
        inbox = self.submit(requests, tracked)
        try:
            while (output := await self.next(inbox)) is not None:
                yield output
        finally:
            self.drop(inbox)

    async def next(self, inbox: Inbox) -> Output | None:
        """Wait for the next output; None: all requests have ended. Raises an error of any of them."""
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
        """Abort the requests of the inbox that have not ended."""
        for request_id in list(inbox.open_ids):
            self.abort(request_id)

    def submit(self, requests: Sequence[NewRequest], tracked: bool = True) -> Inbox:
        """Send requests to the engine; read the outputs with `next` and call `drop` at the end.

        Untracked requests (the server's own probes) are never blocked.
        """
        process = self._supervisor.running
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
        """Abort one request; it has no further outputs. Unknown ids are ignored.

        `completed`: the caller has all the output it needs, so the request counts as successful.
        """
        inbox = self._inboxes.get(request_id)
        if inbox is None:
            return
        process = self._supervisor.process
        if process is not None and not self._quarantine.is_held(request_id):
            process.send(messages.Abort(request_id))
        self._forget(request_id, completed)
        inbox.put(Output(request_id, finish="abort"))  # wakes the consumer

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
        if self._supervisor.process is not None:
            self._send_adds(self._supervisor.process, released)

    async def reset_prefix_cache(self) -> int:
        """Empty the prefix cache of unused blocks; returns their number."""
        reply = await self._call(messages.ResetPrefixCache, messages.CacheReset)
        return reply.num_blocks

    async def trace(self, request_id: str) -> RequestTrace | None:
        """The trace so far of a running request; None: it has ended."""
        reply = await self._call(
            partial(messages.GetTrace, request_id=request_id), messages.TraceReply
        )
        return reply.trace

    async def memory(self) -> Memory:
        """The engine's current memory report."""
        return (await self._call(messages.GetMemory, messages.MemoryReply)).memory

    async def sleep(self) -> None:
        """Release the engine's memory and keep its process; no request may be in flight."""
        await self._sleep_or_wake(messages.Sleep)

    async def wake(self) -> None:
        """Undo `sleep`; an engine that was restarted since is awake already."""
        await self._sleep_or_wake(messages.Wake)

    async def _sleep_or_wake(self, call: type[messages.Sleep] | type[messages.Wake]) -> None:
        with self._supervisor.expect_silence():
            reply = await self._call(call, messages.MemoryReply, _SLEEP_TIMEOUT_S)
        if reply.kind:
            raise build_error(reply.kind, reply.message)

    async def stop_process(self) -> None:
        """Stop the engine process until `start_process`; no request may be in flight."""
        await self._supervisor.stop_process()
        self._pending_calls.fail("the engine process was stopped until the server is woken")

    async def start_process(self) -> None:
        """Start the engine again; on an error it stays stopped."""
        await self._supervisor.start_process()

    async def _call(
        self,
        make_call: Callable[[int], messages.Call],
        reply_type: type[T],
        timeout_s: float = _REPLY_TIMEOUT_S,
    ) -> T:
        send = self._supervisor.running.send
        return await self._pending_calls.call(make_call, reply_type, send=send, timeout_s=timeout_s)

    async def change_adapter(self, change: Change) -> int:
        """Load or unload an adapter; returns the number of running requests that still use it."""
        return await self.adapters.change(change, self._supervisor.running.send)

    def on_message(self, message: messages.FromEngine) -> None:
        match message:
            case messages.Outputs(outputs):
                inboxes = self._inboxes
                for output in outputs:
                    inbox = inboxes.get(output.request_id)
                    if inbox is not None:  # else the request was aborted while the step ran
                        inbox.put(output)
            case messages.Refused(request_id, kind, text, param):
                if (refused := self._inboxes.get(request_id)) is not None:
                    refused.put(refusal_error(kind, text, param))
            case messages.StepFailed(fingerprints, error):
                self._step_failed(fingerprints, error)
            case messages.Stats(stats, num_adds):
                self._update_stats(stats, num_adds)
            case messages.AdapterReply():
                self.adapters.on_reply(message)
            case messages.Traces(traces):
                if self.on_traces is not None:
                    self.on_traces(traces)
            case messages.CacheReset() | messages.TraceReply() | messages.MemoryReply():
                self._pending_calls.on_reply(message)

    def _step_failed(self, running: list[bytes], error: str) -> None:
        """Give the requests of a failed step a strike; the engine reports the error of its own ones."""
        self._quarantine.strike(running, f"a step failed with {error}")
        for request_id, blocked in self._quarantine.blocked_in_flight().items():
            if self._quarantine.is_held(request_id):
                self._inboxes[request_id].put(blocked)

    def _update_stats(self, stats: EngineStats, num_adds: int) -> None:
        last, self.stats = self.stats, stats
        while len(self._unseen) > self._num_sent - num_adds:
            self._unseen.popleft()
        if self.on_stats is not None:
            self.on_stats(stats, last)

    # ---- state -------------------------------------------------------------------------------

    @property
    def report(self) -> EngineReport:
        """The engine's report of its last start."""
        if self._report is None:
            raise EngineError(self.health().reason)
        return self._report

    @property
    def pid(self) -> int | None:
        """The engine's process id; None while no process runs."""
        return self._supervisor.pid

    @property
    def num_in_flight(self) -> int:
        return len(self._inboxes)

    @property
    def backlog(self) -> Backlog:
        stats = self.stats
        unseen = sum(self._unseen) + self._quarantine.num_held_tokens
        return Backlog(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_unseen=len(self._unseen) + self._quarantine.num_held,
            num_tokens=stats.num_waiting_tokens + unseen,
        )

    def health(self) -> Health:
        """Whether the engine would answer a request now, and the reason if not."""
        return self._supervisor.health()


def _end_error(
    inbox: Inbox, how: str, *, started: set[str], blocked: Mapping[str, EngineError]
) -> EngineError:
    """The error that ends the requests of an inbox after their engine has died."""
    for request_id in inbox.open_ids & blocked.keys():
        return blocked[request_id]
    if inbox.open_ids & started:
        return WorkerDied(
            f"{how} while this request was running. Send it again; if the engine fails once more "
            "while it is running, it will be blocked."
        )
    return WorkerDied(f"{how} before this request was started. Send it again.")
