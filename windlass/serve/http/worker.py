"""The process of an HTTP worker."""

from __future__ import annotations

import asyncio
import faulthandler
import socket
import sys
from dataclasses import dataclass, replace
from typing import NoReturn

from windlass.child_process import die_with_parent, ignore_signals
from windlass.core.card import ModelCard
from windlass.garbage import tune_garbage_collector
from windlass.serve.acceptor import Accept
from windlass.serve.app import create_app
from windlass.serve.event_loop import run_loop
from windlass.serve.fallback import FallbackStep
from windlass.serve.fallback_chain import tier_config
from windlass.serve.generation_services import (
    Fallbacks,
    FallbackTier,
    GenerationServices,
    make_generation_services,
)
from windlass.serve.http import messages
from windlass.serve.http.forward import Dispatch, Forwarder
from windlass.serve.http.link import Link
from windlass.serve.http.remote import (
    RemoteAdmission,
    RemoteClient,
    RemoteForecasts,
    RemoteLimits,
    RemoteMetrics,
    RemoteReports,
    RemoteTraces,
)
from windlass.serve.http_server import HttpServer
from windlass.serve.keys import Keys
from windlass.serve.live_config import LiveConfig
from windlass.serve.logs import inherit_logging, set_log_level
from windlass.serve.metric_samples import MetricSample
from windlass.serve.reload import Reloads
from windlass.serve.response import with_direct_send
from windlass.serve.routes import make_worker_router
from windlass.serve.tls import make_tls

_HEARTBEAT_S = 1.0


@dataclass(frozen=True, slots=True)
class FallbackSetup:
    """A step of --fallback; `card`: None: of the server's own model."""

    step: FallbackStep
    card: ModelCard | None = None
    num_replicas: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """What a worker is started with."""

    card: ModelCard
    upstream: str  # unix socket of the server's own HTTP server
    max_connections: int
    num_replicas: int
    exports_traces: bool
    max_metric_tenants: int
    fallbacks: tuple[FallbackSetup, ...] = ()


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
        self._clients: list[
            RemoteClient
        ] = []  # of each engine; empty: the first state has not arrived
        self._live: LiveConfig | None = None
        self._has_state, self._stop = asyncio.Event(), asyncio.Event()
        self._traces = RemoteTraces(self._send)
        self._limits = RemoteLimits(self._send)
        self._forecasts = RemoteForecasts(self._send)
        self._keys: Keys | None = None  # None: the first state has not arrived
        self._metrics = self._make_metrics(setup.card)
        self._all_metrics = [self._metrics]  # of each model
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
        tune_garbage_collector()
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
        setup, client = self._setup, self._clients[0]
        live = self._live = LiveConfig(client.state.config)
        services = self._services_of(
            client, setup.card, live, metrics=self._metrics, num_replicas=setup.num_replicas
        )
        services.desk.check_awake = client.check_open
        if not setup.fallbacks:
            return services
        others = iter(self._clients[1:])
        tiers = []
        for each in setup.fallbacks:
            of_model = None
            if each.card is not None:
                metrics = self._make_metrics(each.card)
                self._all_metrics.append(metrics)
                of_model = self._services_of(
                    next(others),
                    each.card,
                    tier_config(live),
                    metrics=metrics,
                    num_replicas=each.num_replicas,
                )
            tiers.append(FallbackTier(step=each.step, services=of_model))
        fallbacks = Fallbacks(tiers=tiers, forecast=self._forecasts.get)
        return replace(services, fallbacks=fallbacks)

    def _services_of(
        self,
        client: RemoteClient,
        card: ModelCard,
        live: LiveConfig,
        *,
        metrics: RemoteMetrics,
        num_replicas: int,
    ) -> GenerationServices:
        """The services of one model."""
        assert self._keys is not None
        return make_generation_services(
            client,
            card,
            live,
            metrics=metrics,
            admission=RemoteAdmission(client, live),
            traces=self._traces,
            num_replicas=num_replicas,
            reporter=RemoteReports(self._send, live, exports_traces=self._setup.exports_traces),
            keys=self._keys,
            limits=self._limits,
            reloads=self._reloads,
        )

    def _make_metrics(self, card: ModelCard) -> RemoteMetrics:
        return RemoteMetrics(card.name, self._setup.max_metric_tenants, self._send)

    def _samples(self) -> list[MetricSample]:
        return [sample for metrics in self._all_metrics for sample in metrics.samples()]

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
            self._send(messages.Samples(self._samples()))
            await asyncio.sleep(_HEARTBEAT_S)

    def _on_frame(self, frame: bytes) -> None:
        for message in messages.decode_to_worker(frame):
            self._on_message(message)

    def _on_message(self, message: messages.ToWorker) -> None:
        match message:
            case messages.State():
                if not self._clients:
                    self._clients = [
                        RemoteClient(message, self._send, engine)
                        for engine in range(len(message.engines))
                    ]
                    self._keys = Keys.of(message.config, message.tenants)
                    self._has_state.set()
                assert self._keys is not None
                self._keys.table = message.tenants
                for client in self._clients:
                    client.state = message
                if self._live is not None and self._live.value != message.config:
                    self._live.set(message.config)
                    set_log_level(message.config.log_level)
            case messages.Outputs(outputs):
                for client in self._clients:
                    client.on_outputs(outputs)
            case messages.Restarted(request_id):
                for client in self._clients:
                    client.on_restarted(request_id)
            case messages.RequestsFailed():
                for client in self._clients:
                    client.on_failed(message)
            case messages.TracesReply():
                self._traces.on_reply(message)
            case messages.Admitted():
                self._limits.on_reply(message)
            case messages.Forecasts():
                self._forecasts.on_reply(message)
            case messages.Sync(number):
                self._send(messages.Synced(number, self._samples()))
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
