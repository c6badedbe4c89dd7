"""The HTTP workers of a server: starts their processes, hands them connections, restarts them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from windlass.child_process import start_child
from windlass.core.card import Choice
from windlass.errors import EngineError, WorkerDied
from windlass.machine.posix import need_posix
from windlass.serve.acceptor import accept_forever, accept_from
from windlass.serve.health import Heartbeat
from windlass.serve.http import messages
from windlass.serve.http.broker import Broker
from windlass.serve.http.link import Link
from windlass.serve.http.messages import ErrorMessage
from windlass.serve.http.worker import FallbackSetup, WorkerSetup, worker_main
from windlass.serve.metric_samples import MetricSample, add_up
from windlass.serve.services import Services
from windlass.serve.tenant_metrics import OTHER

_log = logging.getLogger("windlass.serve")

_START_TIMEOUT_S = 120.0  # imports on a busy machine
_SYNC_TIMEOUT_S = 1.0
_STOP_TIMEOUT_S = 5.0
_CHECK_S = 0.25
_HANG_S = 30.0  # without a heartbeat
_MAX_UNSENT_BYTES = 256 * 2**20  # of outputs that a worker does not read
_MAX_RESTART_PAUSE_S = 30.0
# Gauges: those of a worker that has ended count no more.
_ENDED_GAUGES = ("windlass:http_connections", "windlass:http_buffered_body_bytes")


class _Worker:
    """One worker process, and what the server knows of it."""

    def __init__(self, setup: WorkerSetup, services: Services, index: int) -> None:
        self.index = index
        ours, theirs = socket.socketpair()
        # Bounded by the kernel: a worker that does not take its connections gets no more.
        self._connections, their_connections = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )
        self._connections.setblocking(False)
        self._link_end: socket.socket | None = ours  # None: the link has it
        self.link = Link(self._on_frame, self._on_lost)
        self.broker = Broker(services, self.send)
        self._metrics = services.metrics
        self._num_in_flight = 0
        self.samples: Sequence[MetricSample] = ()
        self.ready = asyncio.Event()
        self.ended = asyncio.Event()
        self._heartbeat = Heartbeat(_HANG_S)
        self._syncs: dict[int, asyncio.Event] = {}
        with theirs, their_connections:
            self.process = multiprocessing.get_context("spawn").Process(
                target=worker_main,
                args=(setup, theirs, their_connections),
                name=f"windlass-http-{index}",
            )
            start_child(self.process)

    async def open(self, state: messages.State) -> None:
        end, self._link_end = self._link_end, None
        assert end is not None
        await self.link.open(end)
        self.send([state])

    def send(self, batch: Sequence[messages.ToWorker]) -> None:
        self.link.send(messages.encode(batch))

    def take(self, accepted: socket.socket) -> bool:
        """Hand over a connection; False: the worker has too many that it did not take."""
        try:
            socket.send_fds(self._connections, [b"c"], [accepted.fileno()])
        except OSError:  # its buffer is full, or it has ended
            return False
        return True

    async def sync(self, number: int) -> None:
        """Wait until the worker has handled all messages so far, or has ended."""
        done = self._syncs[number] = asyncio.Event()
        self.send([messages.Sync(number)])
        with contextlib.suppress(TimeoutError):  # `check` ends a worker that hangs
            await asyncio.wait_for(done.wait(), _SYNC_TIMEOUT_S)
        del self._syncs[number]

    def _on_frame(self, frame: bytes) -> None:
        self._heartbeat.heard()
        for message in messages.decode_from_worker(frame):
            match message:
                case messages.Samples(samples):
                    self.samples = samples
                    self.ready.set()
                case messages.Synced(number, samples):
                    self.samples = samples
                    if number in self._syncs:
                        self._syncs[number].set()
                case messages.Received():
                    self._metrics.received()
                    self._num_in_flight += 1
                case messages.Finished(outcome, tenant):
                    self._metrics.ended(outcome, tenant)
                    self._num_in_flight -= 1
                case _:
                    self.broker.on_message(message)

    def _on_lost(self) -> None:
        for _ in range(self._num_in_flight):
            self._metrics.ended("error", OTHER)  # their tenants died with the worker
        self._num_in_flight = 0
        for done in self._syncs.values():
            done.set()
        self.ended.set()

    def check(self) -> None:
        """Kill a worker that hangs."""
        self._heartbeat.tick()
        if self.link.num_unsent_bytes > _MAX_UNSENT_BYTES or self._heartbeat.is_late:
            _log.error("HTTP worker %d does not respond and is killed", self.index)
            self.process.kill()

    async def close(self) -> None:
        """Abort its requests, and wait for its process; kills it if that takes too long."""
        self.broker.close()
        await asyncio.to_thread(self.process.join, _STOP_TIMEOUT_S)
        if self.process.is_alive():
            self.process.kill()
            await asyncio.to_thread(self.process.join)
        self.link.close()
        if self._link_end is not None:
            self._link_end.close()
        self._connections.close()
        self.process.close()


class HttpWorkers:
    """Owns the workers. Created inside a running event loop; the processes start at once."""

    def __init__(self, services: Services, max_connections: int) -> None:
        """`max_connections`: of each worker."""
        need_posix("--http-workers above 1", "socket.AF_UNIX", "socket.send_fds")
        self._services = services
        self._folder = tempfile.TemporaryDirectory(prefix="windlass-http-")
        path = str(Path(self._folder.name) / "server")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self._setup = WorkerSetup(
            card=services.card,
            upstream=path,
            max_connections=max(1, max_connections),
            num_replicas=len(services.client.replicas),
            exports_traces=services.reports.exports_traces,
            max_metric_tenants=services.config.max_metric_tenants,
            fallbacks=_fallback_setups(services),
        )
        self._workers = [self._launch(index) for index in range(services.config.http_workers)]
        self._next = itertools.cycle(range(len(self._workers)))
        self._numbers = itertools.count()
        self._state: messages.State | None = None
        self._retired: list[MetricSample] = []
        self._tasks: list[asyncio.Task[None]] = []
        services.metrics.workers = self
        services.reloads.add("HTTP workers", self._reload)

    def _launch(self, index: int) -> _Worker:
        return _Worker(self._setup, self._services, index)

    async def start(self, listener: socket.socket) -> Choice:
        """Wait until all workers serve, then accept connections; returns a line for the table."""
        self._state = self._current_state()
        for worker in self._workers:
            await worker.open(self._state)
            await self._wait_ready(worker)
        accept = accept_from(listener)
        self._tasks = [
            asyncio.create_task(accept_forever(accept, self._hand_over)),
            asyncio.create_task(self._watch()),
            *(asyncio.create_task(self._keep_up(index)) for index in range(len(self._workers))),
        ]
        for task in self._tasks:
            task.add_done_callback(_report_failure)
        return Choice("HTTP workers", str(len(self._workers)), "processes for HTTP and text")

    async def _wait_ready(self, worker: _Worker) -> None:
        ready, ended = (
            asyncio.create_task(worker.ready.wait()),
            asyncio.create_task(worker.ended.wait()),
        )
        await asyncio.wait(
            {ready, ended}, timeout=_START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
        )
        ready.cancel()
        ended.cancel()
        if not worker.ready.is_set():
            raise WorkerDied(f"HTTP worker {worker.index} did not start; see its log.")

    def _hand_over(self, accepted: socket.socket) -> None:
        """Give a connection to the next worker that takes it."""
        with accepted:
            for _ in self._workers:
                if self._workers[next(self._next)].take(accepted):
                    return
            _log.warning("a connection was closed: no HTTP worker takes connections")

    # ---- state -------------------------------------------------------------------------------

    def _current_state(self) -> messages.State:
        refusal = None
        try:
            self._services.desk.check_open()
        except EngineError as error:
            refusal = ErrorMessage.of(error)
        return messages.State(
            engines=[
                messages.EngineView(
                    client.report, client.max_num_seqs, sorted(client.adapter_names)
                )
                for client, _ in self._services.engines
            ],
            tenants=self._services.keys.table,
            refusal=refusal,
            config=self._services.config,
        )

    def push_state(self) -> bool:
        """Send the state to the workers; False: it has not changed."""
        state = self._current_state()
        if self._state is None or state == self._state:
            return False
        self._state = state
        for worker in self._workers:
            worker.send([state])
        return True

    def announcing(self, app: ASGIApp) -> ASGIApp:
        """`app`, whose responses to changes wait until all workers know what has changed.

        A client may use an adapter as soon as the response to its load has arrived.
        """

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_in_order(message: Message) -> None:
                if message["type"] == "http.response.start" and self.push_state():
                    await self.refresh()
                await send(message)

            await app(scope, receive, send if scope["method"] == "GET" else send_in_order)

        return call

    async def _reload(self) -> str:
        for worker in self._workers:
            worker.send([messages.Reload()])
        return f"{len(self._workers)} workers read their files again"

    async def refresh(self) -> None:
        """Wait until the workers have handled all messages, and have sent their metrics."""
        syncs = [worker.sync(next(self._numbers)) for worker in self._workers]
        await asyncio.gather(*syncs)

    def samples(self) -> Sequence[MetricSample]:
        return [*self._retired, *itertools.chain(*(worker.samples for worker in self._workers))]

    # ---- failures ----------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            self.push_state()
            for worker in self._workers:
                worker.check()

    async def _keep_up(self, index: int) -> None:
        """Restart the worker whenever it ends, with pauses that grow if it ends at once."""
        pause_s = 0.0
        while True:
            worker = self._workers[index]
            began = time.monotonic()
            await worker.ended.wait()
            _log.error("HTTP worker %d has ended and is restarted; its requests are lost", index)
            self._services.metrics.worker_restarted()
            kept = (each for each in worker.samples if each.name not in _ENDED_GAUGES)
            self._retired = add_up([*self._retired, *kept])
            worker.samples = ()
            await worker.close()
            worker.broker.report_lost()
            if time.monotonic() - began > _MAX_RESTART_PAUSE_S:
                pause_s = 0.0
            await asyncio.sleep(pause_s)
            pause_s = min(max(1.0, 2 * pause_s), _MAX_RESTART_PAUSE_S)
            assert self._state is not None
            self._workers[index] = worker = self._launch(index)
            await worker.open(self._state)

    async def close(self) -> None:
        """Let the workers send their last responses, and end them. May be called twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.send([messages.Stop()])
            if self._state is None:  # it waits for its first state
                worker.process.kill()
        await asyncio.gather(*(worker.close() for worker in workers))
        self.listener.close()
        self._folder.cleanup()


def _fallback_setups(services: Services) -> tuple[FallbackSetup, ...]:
    tiers = () if services.fallbacks is None else services.fallbacks.tiers
    return tuple(
        FallbackSetup(each.step)
        if each.services is None
        else FallbackSetup(each.step, each.services.card, each.services.num_replicas)
        for each in tiers
    )


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        _log.error("the HTTP workers are no longer watched", exc_info=task.exception())
