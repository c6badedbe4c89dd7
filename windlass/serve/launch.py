"""Starts a server: takes the address, starts the engine, and then loads what speaks HTTP.

The address is taken before the model is loaded, so that a port in use is known at once. The
server's life from then on is service.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import queue
import signal
import socket
import stat
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from windlass.config import ServeConfig
from windlass.core.card import EngineReport, ModelCard
from windlass.errors import ConfigError
from windlass.serve.client import EngineClient
from windlass.serve.descriptors import raise_descriptor_limit

_log = logging.getLogger("windlass.serve")

# After --shutdown-timeout: for the last answers, and for the engine's process to end.
_EXIT_GRACE_S = 15.0

OnReady = Callable[[EngineReport, str], None]
OpenCard = Callable[[], ModelCard]


def serve(client: EngineClient, open_card: OpenCard, config: ServeConfig, on_ready: OnReady) -> int:
    """Serve until a signal comes or the engine is down for good; returns the exit code.

    `open_card` is called while the engine's process starts, and may tell it what to build.
    The first SIGTERM or SIGINT lets running requests finish, the second ends at once. After the
    first one this process ends in any case: whatever blocks it has _EXIT_GRACE_S more than
    --shutdown-timeout, and then the exit is forced.
    """
    raise_descriptor_limit()
    listener = bind(config)
    try:
        return run_loop(_serve_until_signal(client, open_card, config, listener, on_ready))
    finally:
        listener.close()
        if config.uds is not None:
            Path(config.uds).unlink(missing_ok=True)


class ExitDeadline:
    """Calls `force_exit` at the second signal, or `seconds` after the first.

    Its thread starts now: a signal handler may run anywhere, also where no thread can be started.
    """

    def __init__(self, seconds: float, force_exit: Callable[[], None]) -> None:
        self._seconds = seconds
        self._force_exit = force_exit
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()
        threading.Thread(target=self._wait, name="windlass-exit", daemon=True).start()

    def signalled(self) -> None:
        """Note a signal. Safe to call from a signal handler."""
        self._signals.put(None)

    def _wait(self) -> None:
        self._signals.get()
        with contextlib.suppress(queue.Empty):
            self._signals.get(timeout=self._seconds)
        self._force_exit()


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run `main` in uvloop's event loop where that is installed, else in asyncio's own."""
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
    loop = asyncio.get_running_loop()

    def force_exit() -> None:
        _log.error("the server is ended by force: a second signal came, or it took too long to end")
        client.kill()
        os._exit(1)

    deadline = ExitDeadline(config.shutdown_timeout + _EXIT_GRACE_S, force_exit)

    # Not loop.add_signal_handler: a handler of the event loop never runs while the loop is blocked.
    def on_signal(_number: int, _frame: object) -> None:
        deadline.signalled()
        loop.call_soon_threadsafe(stop.set)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
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
