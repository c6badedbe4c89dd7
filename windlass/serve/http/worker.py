"""The process of an HTTP worker."""

from __future__ import annotations

import asyncio
import faulthandler
import socket
import sys
from dataclasses import dataclass
from typing import NoReturn

from windlass.child_process import die_with_parent, ignore_signals
from windlass.core.card import ModelCard
from windlass.serve.acceptor import Accept
from windlass.serve.app import create_app
from windlass.serve.event_loop import run_loop
from windlass.serve.http import messages
from windlass.serve.http.forward import Dispatch, Forwarder
from windlass.serve.http.link import Link
from windlass.serve.http.remote import (
    RemoteAdmission,
    RemoteClient,
    RemoteLimits,
    RemoteMetrics,
    RemoteReports,
    RemoteTraces,
)
from windlass.serve.http_server import HttpServer
from windlass.serve.keys import Keys
from windlass.serve.live_config import LiveConfig
from windlass.serve.logs import inherit_logging, set_log_level
from windlass.serve.reload import Reloads
from windlass.serve.response import with_direct_send
from windlass.serve.routes import make_worker_router
from windlass.serve.services import GenerationServices, make_generation_services
from windlass.serve.tls import make_tls

_HEARTBEAT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """What a worker is started with."""

    card: ModelCard
    upstream: str  # unix socket of the server's own HTTP server
    max_connections: int
    num_replicas: int
    exports_traces: bool
    max_metric_tenants: int


def worker_main(setup: WorkerSetup, link: socket.socket, connections: socket.socket) -> NoReturn:
    """Main function of the process. `connections` brings the descriptors of connections."""
    die_with_parent()
    ignore_signals()
    faulthandler.enable()
    inherit_logging()
    sys.exit(run_loop(_Worker(setup).run(link, connections)))


class _Worker:
    """Owns the link to the server's process, and the HTTP server of this process."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._link = Link(self._on_frame, self._on_lost)
        self._client: RemoteClient | None = None  # None: the first state has not arrived
        self._live: LiveConfig | None = None
        self._has_state, self._stop = asyncio.Event(), asyncio.Event()
        self._traces = RemoteTraces(self._send)
        self._limits = RemoteLimits(self._send)
        self._keys: Keys | None = None  # None: the first state has not arrived
        self._metrics = RemoteMetrics(setup.card.name, setup.max_metric_tenants, self._send)
        self._reloads = Reloads()  # at every SIGHUP of the server's process
        self._outgoing: list[messages.FromWorker] = []

    async def run(self, link: socket.socket, connections: socket.socket) -> int:
        """Serve until the server's process says so, or has ended."""
        await self._link.open(link)
        await self._has_state.wait()
        services = self._make_services()
        forward = Forwarder(self._setup.upstream)
        router, paths = make_worker_router(services)
        app = Dispatch(with_direct_send(create_app(services, router)), forward, paths)
        tls = make_tls(services.config, services.reloads)
        server = HttpServer(
            app,
            services.live,
            metrics=self._metrics,
            max_connections=self._setup.max_connections,
            tls=tls,
            accept=_receive_from(connections),
        )
        self._metrics.watch_connections(server.connections)
        serving = await server.start()
        tasks = [
            asyncio.create_task(server.connections.sweep_forever()),
            asyncio.create_task(self._report_forever()),
        ]
        if tls is not None and services.config.enable_ssl_refresh:
            tasks.append(asyncio.create_task(tls.refresh_forever()))
        await self._stop.wait()
        server.should_exit = True
        await serving
        server.connections.abort_all()
        for task in tasks:
            task.cancel()
        await forward.close()
        services.close()
        return 0

    def _make_services(self) -> GenerationServices:
        client = self._client
        assert client is not None
        assert self._keys is not None
        live = LiveConfig(client.state.config)
        services = make_generation_services(
            client,
            self._setup.card,
            live,
            metrics=self._metrics,
            admission=RemoteAdmission(client, live),
            traces=self._traces,
            num_replicas=self._setup.num_replicas,
            reporter=RemoteReports(self._send, live, exports_traces=self._setup.exports_traces),
            keys=self._keys,
            limits=self._limits,
            reloads=self._reloads,
        )
        services.desk.check_awake = client.check_open
        self._live = live
        return services

    def _send(self, message: messages.FromWorker) -> None:
        """Send with all other messages of this turn of the event loop."""
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(message)

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        self._link.send(messages.encode(outgoing))

    async def _report_forever(self) -> None:
        while True:
            self._send(messages.Samples(self._metrics.samples()))
            await asyncio.sleep(_HEARTBEAT_S)

    def _on_frame(self, frame: bytes) -> None:
        for message in messages.decode_to_worker(frame):
            self._on_message(message)

    def _on_message(self, message: messages.ToWorker) -> None:
        match message:
            case messages.State():
                if self._client is None:
                    self._client = RemoteClient(message, self._send)
                    self._keys = Keys.of(message.config, message.tenants)
                    self._has_state.set()
                assert self._keys is not None
                self._client.state, self._keys.table = message, message.tenants
                if self._live is not None and self._live.value != message.config:
                    self._live.set(message.config)
                    set_log_level(message.config.log_level)
            case messages.Outputs(outputs):
                assert self._client is not None
                self._client.on_outputs(outputs)
            case messages.Restarted(request_id):
                assert self._client is not None
                self._client.on_restarted(request_id)
            case messages.RequestsFailed():
                assert self._client is not None
                self._client.on_failed(message)
            case messages.TracesReply():
                self._traces.on_reply(message)
            case messages.Admitted():
                self._limits.on_reply(message)
            case messages.Sync(number):
                self._send(messages.Synced(number, self._metrics.samples()))
            case messages.Reload():
                self._reloads.request()
            case messages.Stop():
                self._stop.set()

    def _on_lost(self) -> None:
        self._stop.set()


def _receive_from(connections: socket.socket) -> Accept:
    """The function that waits for the next connection that the server's process has accepted."""
    connections.setblocking(False)

    async def accept() -> socket.socket:
        loop = asyncio.get_running_loop()
        while True:
            try:
                _, [descriptor, *_rest], _, _ = socket.recv_fds(connections, 1, 1)
            except BlockingIOError:
                await _readable(loop, connections)
            else:
                return socket.socket(fileno=descriptor)

    return accept


async def _readable(loop: asyncio.AbstractEventLoop, end: socket.socket) -> None:
    ready = asyncio.Event()
    loop.add_reader(end, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(end)
