"""Runs a server: waits for the engine, serves HTTP, drains and ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import uvicorn

from windlass.config import ServeConfig
from windlass.core.card import EngineReport, ModelCard
from windlass.errors import WorkerDied
from windlass.serve.app import create_app
from windlass.serve.connections import ConnectionLimits, Connections
from windlass.serve.descriptors import connection_cap
from windlass.serve.handle import EngineHandle
from windlass.serve.listener import OnReady, url_of
from windlass.serve.response import with_direct_send
from windlass.serve.services import make_services
from windlass.serve.throughput_log import ThroughputLog
from windlass.serve.tls import TlsListener, tls_context
from windlass.serve.transport import LimitedProtocol

_log = logging.getLogger("windlass.serve")

_LAST_RESPONSES_S = 2  # after the drain: for the error responses of the remaining requests


class _UvicornServer(uvicorn.Server):
    """uvicorn without its signal handlers, and with a TLS listener that enforces our limits."""

    def __init__(
        self, config: uvicorn.Config, connections: Connections, tls: ssl.SSLContext | None
    ) -> None:
        super().__init__(config)
        self._connections = connections
        self._tls = tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._tls is None:
            await super().startup(sockets)
            return
        assert sockets is not None
        await self.lifespan.startup()
        make_protocol = partial(
            cast(Callable[..., LimitedProtocol], self.config.http_protocol_class),
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        self.servers: list[Any] = [
            TlsListener(each, self._tls, make_protocol=make_protocol, connections=self._connections)
            for each in sockets
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """Owns the HTTP server and, through the client, the engine process."""

    def __init__(
        self,
        client: EngineHandle,
        card: ModelCard,
        *,
        config: ServeConfig,
        listener: socket.socket,
    ) -> None:
        self._client = client
        self._config = config
        self._listener = listener
        self._services = make_services(client, card, config)
        self._max_connections = connection_cap(config.max_connections)
        self._connections = self._make_connections()
        tls = tls_context(config)
        self._server = _UvicornServer(self._uvicorn_config(), self._connections, tls)

    def _make_connections(self) -> Connections:
        metrics = self._services.metrics
        limits = ConnectionLimits.of(self._config, int(self._max_connections.value))
        connections = Connections(limits, metrics.connection_cut)
        metrics.watch_connections(lambda: connections.num_open, lambda: connections.num_body_bytes)
        return connections

    def _uvicorn_config(self) -> uvicorn.Config:
        protocol = partial(LimitedProtocol, connections=self._connections)
        return uvicorn.Config(
            with_direct_send(create_app(self._services)),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            http=cast(type[asyncio.Protocol], protocol),
            timeout_keep_alive=math.ceil(self._config.keep_alive_timeout),
            timeout_graceful_shutdown=_LAST_RESPONSES_S,
        )

    async def run(
        self, engine: asyncio.Task[EngineReport], on_ready: OnReady, stop: asyncio.Event
    ) -> int:
        """Serve until `stop` is set, then drain; returns the exit code, 1 if the engine failed."""
        try:
            report = await self._wait_for_engine(engine, stop)
            if report is None:
                return 0
            return await self._serve(report, on_ready, stop)
        finally:
            await self._client.close()
            self._services.close()

    async def _wait_for_engine(
        self, start: asyncio.Task[EngineReport], stop: asyncio.Event
    ) -> EngineReport | None:
        """Wait for the engine's report; None: `stop` was set before the engine was ready."""
        stopped = asyncio.create_task(stop.wait())
        either: set[asyncio.Task[Any]] = {start, stopped}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if start.done():
            return start.result()
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        return None

    async def _serve(self, report: EngineReport, on_ready: OnReady, stop: asyncio.Event) -> int:
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        stopped = asyncio.create_task(stop.wait())
        failed = asyncio.create_task(self._client.failed.wait())
        while not (self._server.started or serving.done()):
            await asyncio.sleep(0.01)
        if serving.done():
            await serving  # raises the error that prevented it from listening
        helpers = [asyncio.create_task(work) for work in self._endless()]
        batches = asyncio.create_task(self._run_batches())
        choices = [*report.choices, *self._services.choices, self._max_connections]
        report = replace(report, choices=choices)
        on_ready(report, url_of(self._config, self._listener))
        either: set[asyncio.Task[Any]] = {serving, stopped, failed, batches, *helpers}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        for helper in helpers:
            if helper.done():
                await helper  # raises the error that ended it
        batches.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await batches  # their requests end now, and run again after the next start
        engine_failed = failed.done()
        for task in (stopped, failed):
            task.cancel()
        if engine_failed:
            _log.error("the server exits: %s", self._client.health().reason)
        else:
            await self._drain()
        self._server.should_exit = True
        await serving
        for helper in helpers:
            helper.cancel()
        self._connections.abort_all()
        return int(engine_failed)

    async def _run_batches(self) -> None:
        if self._services.batches is None:
            await asyncio.Event().wait()
        else:
            await self._services.batches.run(self._client.max_num_seqs)

    def _endless(self) -> Iterator[Coroutine[Any, Any, None]]:
        """Work that goes on as long as the server does."""
        yield self._connections.sweep_forever()
        replicas, interval_s = self._client.replicas, self._config.log_stats_interval
        if interval_s:
            yield ThroughputLog(len(replicas)).run(replicas, interval_s)

    async def _drain(self) -> None:
        """Refuse new requests, wait for running ones, and fail those that do not finish in time."""
        desk, timeout_s = self._services.desk, self._config.shutdown_timeout
        desk.draining = True
        _log.info("shutting down; %d requests are running", desk.num_in_flight)
        if await desk.idle(timeout_s):
            return
        _log.warning("%d requests did not finish in %g s", desk.num_in_flight, timeout_s)
        self._client.abort_all(
            WorkerDied(f"the server shut down before this request ended ({timeout_s:g} s given).")
        )
        await desk.idle(_LAST_RESPONSES_S)
