"""Runs a server: waits for the engine, serves HTTP, drains and ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any

from windlass.core.card import Choice, EngineReport, ModelCard
from windlass.errors import WorkerDied
from windlass.garbage import tune_garbage_collector
from windlass.serve.app import create_app
from windlass.serve.descriptors import connection_cap
from windlass.serve.fallback_chain import FallbackEngine
from windlass.serve.handle import EngineHandle
from windlass.serve.http.pool import HttpWorkers
from windlass.serve.http_server import LAST_RESPONSES_S, HttpServer
from windlass.serve.listener import OnReady, url_of
from windlass.serve.live_config import LiveConfig, StartConfig
from windlass.serve.prefill_listener import PrefillListener
from windlass.serve.prefill_port import PrefillPort
from windlass.serve.reload import Reloads
from windlass.serve.response import with_direct_send
from windlass.serve.routes import make_router
from windlass.serve.services import make_services
from windlass.serve.throughput_log import ThroughputLog
from windlass.serve.tls import Tls, make_tls

_log = logging.getLogger("windlass.serve")


class Server:
    """Owns the HTTP server and, through the client, the engine process."""

    def __init__(
        self,
        client: EngineHandle,
        card: ModelCard,
        *,
        config: LiveConfig,
        started: StartConfig,
        listener: socket.socket,
        reloads: Reloads,
        prefill: PrefillListener | None = None,
        fallback_engines: Sequence[FallbackEngine] = (),
    ) -> None:
        self._client = client
        others = (each.client for each in fallback_engines)
        self._clients = [client, *(each for each in others if each is not None)]
        self._listener = listener
        self._prefill_listener = prefill
        self._prefill_port: PrefillPort | None = None  # None: not --role prefill, or not ready
        self._services = make_services(
            client,
            card,
            config,
            reloads=reloads,
            started=started,
            fallback_engines=fallback_engines,
        )
        self._tls: Tls | None = None  # None: plain HTTP, or the workers have it
        self._workers: HttpWorkers | None = None  # None: this process does their work
        try:
            self._max_connections = connection_cap(config.value.max_connections)
            self._server = self._make_server(int(self._max_connections.value))
        except BaseException:
            self._services.close()
            raise

    def _make_server(self, max_connections: int) -> HttpServer:
        config = self._services.config
        # Also where workers use it: a bad file is found now.
        tls = make_tls(config, self._services.reloads)
        app = with_direct_send(create_app(self._services, make_router(self._services)))
        if config.http_workers > 1:
            self._workers = HttpWorkers(self._services, max_connections // config.http_workers)
            app = self._workers.announcing(app)
        self._tls = None if self._workers else tls
        server = HttpServer(
            app,
            self._services.live,
            metrics=self._services.metrics,
            max_connections=max_connections,
            tls=self._tls,
        )
        if self._workers is None:
            self._services.metrics.watch_connections(server.connections)
        return server

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
            await asyncio.gather(*(client.close() for client in self._clients))
            if self._workers is not None:
                await self._workers.close()
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
        stopped = asyncio.create_task(stop.wait())
        failed = asyncio.create_task(self._client.failed.wait())
        listener = self._listener if self._workers is None else self._workers.listener
        serving = await self._server.start([listener])
        helpers = [asyncio.create_task(work) for work in self._endless()]
        batches = asyncio.create_task(self._run_batches())
        choices = [*report.choices, *self._services.choices, self._max_connections]
        if self._prefill_listener is not None:
            self._prefill_port = PrefillPort(self._services, self._prefill_listener)
            choices.append(self._prefill_port.choice)
        if self._services.fallbacks is not None:
            choices += self._services.fallbacks.choices()
        ends: set[asyncio.Task[Any]] = {serving, stopped, failed, batches, *helpers}
        if self._workers is not None:
            choices += await self._start_workers(self._workers, ends)
        if not any(end.done() for end in ends):
            tune_garbage_collector()
            report = replace(report, choices=choices)
            on_ready(report, url_of(self._services.config, self._listener))
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
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
        if self._prefill_port is not None:
            await self._prefill_port.close()
        if self._workers is not None:
            await self._workers.close()
        self._server.should_exit = True
        await serving
        for helper in helpers:
            helper.cancel()
        self._server.connections.abort_all()
        return int(engine_failed)

    async def _run_batches(self) -> None:
        if self._services.batches is None:
            await asyncio.Event().wait()
        else:
            await self._services.batches.run(self._client.max_num_seqs)

    def _endless(self) -> Iterator[Coroutine[Any, Any, None]]:
        """Work that goes on as long as the server does."""
        yield self._server.connections.sweep_forever()
        if self._tls is not None and self._services.config.enable_ssl_refresh:
            yield self._tls.refresh_forever()
        if self._services.usage is not None:
            yield self._services.usage.write_forever()
        replicas = self._client.replicas
        yield ThroughputLog(len(replicas)).run(replicas, self._services.live)

    async def _start_workers(
        self, workers: HttpWorkers, ends: set[asyncio.Task[Any]]
    ) -> list[Choice]:
        """Start the workers unless the server ends meanwhile; returns a line for the table."""
        start = asyncio.create_task(workers.start(self._listener))
        await asyncio.wait({start, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            return [start.result()]
        start.cancel()
        return []

    async def _drain(self) -> None:
        """Refuse new requests, wait for running ones, and fail those that do not finish in time."""
        desk, timeout_s = self._services.desk, self._services.config.shutdown_timeout
        desk.draining = True
        if self._workers is not None:
            self._workers.push_state()
        _log.info("shutting down; %d requests are running", desk.num_in_flight)
        if await desk.idle(timeout_s):
            return
        _log.warning("%d requests did not finish in %g s", desk.num_in_flight, timeout_s)
        for client in self._clients:
            client.abort_all(
                WorkerDied(
                    f"the server shut down before this request ended ({timeout_s:g} s given)."
                )
            )
        await desk.idle(LAST_RESPONSES_S)
