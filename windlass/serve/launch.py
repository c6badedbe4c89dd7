"""Starts a server: takes the address, starts the engine, and then loads what speaks HTTP.

The address is taken before the model is loaded, so that a port in use is known at once. The
server's life from then on is service.py's.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import socket
import stat
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from windlass.config import ServeConfig
from windlass.core.card import EngineReport, ModelCard
from windlass.errors import ConfigError
from windlass.serve.client import EngineClient

OnReady = Callable[[EngineReport, str], None]
OpenCard = Callable[[], ModelCard]


def serve(client: EngineClient, open_card: OpenCard, config: ServeConfig, on_ready: OnReady) -> int:
    """Serve until a signal comes or the engine is down for good; returns the exit code.

    `open_card` is called while the engine's process starts, and may tell it what to build.
    The first SIGTERM or SIGINT lets running requests finish, the second ends at once.
    """
    listener = bind(config)
    try:
        return _run(_serve_until_signal(client, open_card, config, listener, on_ready))
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
    open_card: OpenCard,
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
    return await live(client, open_card, config, listener, on_ready, stop)


async def live(
    client: EngineClient,
    open_card: OpenCard,
    config: ServeConfig,
    listener: socket.socket,
    on_ready: OnReady,
    stop: asyncio.Event,
) -> int:
    """Start the engine and serve until `stop` is set or the engine is lost."""
    engine = asyncio.create_task(client.start())
    # Its process starts, and loads while the card and the server's modules are loaded here.
    await asyncio.sleep(0)
    try:
        card = open_card()
        await asyncio.sleep(0)  # what to build is on its way
        from windlass.serve.service import Service

        service = Service(client, card, config, listener)
    except BaseException:
        engine.cancel()
        await asyncio.gather(engine, return_exceptions=True)
        await client.close()
        raise
    return await service.run(engine, on_ready, stop)


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
