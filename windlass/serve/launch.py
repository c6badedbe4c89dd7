"""Runs a server from the first check to the last answer: bind, load, serve, drain.

The address is taken before the model is loaded, so that a port in use is known at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import signal
import socket
import ssl
import stat
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from windlass.config import ServeConfig
from windlass.core.card import EngineReport, ModelCard
from windlass.errors import ConfigError, WorkerDied
from windlass.serve.app import create_app
from windlass.serve.client import EngineClient
from windlass.serve.services import make_services

OnReady = Callable[[EngineReport, str], None]

_log = logging.getLogger("windlass.serve")

_KEEP_ALIVE_S = 30
_LAST_ANSWERS_S = 2  # after the drain: for the errors that tell the rest of the requests


def serve(client: EngineClient, card: ModelCard, config: ServeConfig, on_ready: OnReady) -> int:
    """Serve until a signal comes or the engine is down for good; returns the exit code.

    The first SIGTERM or SIGINT lets running requests finish, the second ends at once.
    """
    listener = bind(config)
    try:
        return _run(_serve_until_signal(client, card, config, listener, on_ready))
    finally:
        listener.close()
        if config.uds is not None:
            Path(config.uds).unlink(missing_ok=True)


def _run(main: Coroutine[Any, Any, int]) -> int:
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.run(main)
    import uvloop

    return uvloop.run(main)


async def _serve_until_signal(
    client: EngineClient,
    card: ModelCard,
    config: ServeConfig,
    listener: socket.socket,
    on_ready: OnReady,
) -> int:
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            client.kill()
            os._exit(1)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return await Service(client, card, config, listener).run(on_ready, stop)


def bind(config: ServeConfig) -> socket.socket:
    """Take the address; one that is taken already is an error that says what to do."""
    if config.uds is not None:
        return _bind_path(config.uds)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port}: {error.strerror or error}. "
            "Choose another with --port (0: any free one), or stop what uses it."
        ) from error
    return listener


def _bind_path(path: str) -> socket.socket:
    """Listen on a unix socket; one left behind by a server that is gone is replaced."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if Path(path).exists() and stat.S_ISSOCK(os.stat(path).st_mode):
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(path) != 0:
                    os.unlink(path)
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on --uds {path}: {error.strerror or error}.") from error
    return listener


def url_of(config: ServeConfig, listener: socket.socket) -> str:
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if config.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: what a signal means is decided here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Service:
    """One server's life. Owns the HTTP server and, through the client, the engine."""

    def __init__(
        self, client: EngineClient, card: ModelCard, config: ServeConfig, listener: socket.socket
    ) -> None:
        self._client = client
        self._config = config
        self._listener = listener
        self._services = make_services(client, card, config)
        self._server = _Server(self._uvicorn_config())

    def _uvicorn_config(self) -> uvicorn.Config:
        config = self._config
        return uvicorn.Config(
            create_app(self._services),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_LAST_ANSWERS_S,
            ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile,
            ssl_ca_certs=config.ssl_ca_certs,
            ssl_cert_reqs=ssl.CERT_REQUIRED if config.ssl_ca_certs else ssl.CERT_NONE,
        )

    async def run(self, on_ready: OnReady, stop: asyncio.Event) -> int:
        """Load, serve, and when `stop` is set drain and end; 1 when the engine was lost."""
        try:
            report = await self._unless_stopped(stop)
            if report is None:
                return 0
            return await self._serve(report, on_ready, stop)
        finally:
            await self._client.close()
            if self._services.recorder is not None:
                self._services.recorder.close()

    async def _unless_stopped(self, stop: asyncio.Event) -> EngineReport | None:
        """Start the engine; None when the server is told to stop before it is ready."""
        start = asyncio.create_task(self._client.start())
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
        lost = asyncio.create_task(self._client.failed.wait())
        while not (self._server.started or serving.done()):
            await asyncio.sleep(0.01)
        if serving.done():
            await serving  # raises what kept it from listening
        on_ready(report, url_of(self._config, self._listener))
        either: set[asyncio.Task[Any]] = {serving, stopped, lost}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        engine_lost = lost.done()
        for task in (stopped, lost):
            task.cancel()
        if engine_lost:
            _log.error("the server ends: %s", self._client.health().reason)
        else:
            await self._drain()
        self._server.should_exit = True
        await serving
        return int(engine_lost)

    async def _drain(self) -> None:
        """Take nothing new, let what runs finish, and tell the rest that it will not."""
        desk, timeout_s = self._services.desk, self._config.shutdown_timeout
        desk.draining = True
        _log.info("shutting down; %d requests are running", desk.num_in_flight)
        if await desk.idle(timeout_s):
            return
        _log.warning("%d requests did not finish in %g s", desk.num_in_flight, timeout_s)
        self._client.abort_all(
            WorkerDied(f"the server shut down before this request ended ({timeout_s:g} s given).")
        )
        await desk.idle(_LAST_ANSWERS_S)
