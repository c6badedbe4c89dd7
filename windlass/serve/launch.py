"""Starts a server: binds the address, starts the engine process, then imports the HTTP stack.

The address is bound before the model is loaded, so that a port in use is reported at once.
server.py runs the server from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from windlass.config import Device, ServeConfig
from windlass.core.card import EngineReport, ModelCard
from windlass.machine.device import runs_on_cpu
from windlass.serve.descriptors import raise_descriptor_limit
from windlass.serve.event_loop import run_loop
from windlass.serve.fallback import FallbackStep
from windlass.serve.handle import EngineHandle
from windlass.serve.listener import OnReady, bind
from windlass.serve.live_config import LiveConfig, StartConfig
from windlass.serve.prefill_listener import PrefillListener
from windlass.serve.reload import Reloads

_log = logging.getLogger("windlass.serve")

# After --shutdown-timeout: time for the last responses and for the engine process to end.
_EXIT_GRACE_S = 15.0

_CORES_PER_WORKER = 4
_MAX_DEFAULT_WORKERS = 4

OpenCard = Callable[[], ModelCard]


@dataclass(frozen=True, slots=True)
class FallbackParts:
    """A step of --fallback. A step without a model has only the step."""

    step: FallbackStep
    client: EngineHandle | None = None
    open_card: OpenCard | None = None


@dataclass(frozen=True, slots=True)
class ServerParts:
    """What a server is started with. `open_card` may also pass the build to `client`."""

    client: EngineHandle
    open_card: OpenCard
    config: LiveConfig
    listener: socket.socket
    on_ready: OnReady
    reloads: Reloads = field(default_factory=Reloads)
    started: StartConfig = field(default_factory=StartConfig)
    fallbacks: Sequence[FallbackParts] = ()
    prefill: PrefillListener | None = None  # None: not --role prefill

    @property
    def clients(self) -> list[EngineHandle]:
        """The engines of all models, the server's own first."""
        others = (each.client for each in self.fallbacks)
        return [self.client, *(each for each in others if each is not None)]


def serve(
    client: EngineHandle,
    open_card: OpenCard,
    config: ServeConfig,
    on_ready: OnReady,
    *,
    started: StartConfig = StartConfig(),  # noqa: B008
    fallbacks: Sequence[FallbackParts] = (),
    prefill: PrefillListener | None = None,
) -> int:
    """Serve until a signal arrives or the engine has failed for good; returns the exit code.

    `open_card` runs while the engine process starts, and may pass it the build.
    SIGHUP reads certificates and keys again. The first SIGTERM or SIGINT lets running requests finish, the second one exits at once. After
    the first signal the process exits in any case: if anything blocks it for longer than
    --shutdown-timeout plus _EXIT_GRACE_S, the exit is forced.
    """
    raise_descriptor_limit()
    listener = bind(config)
    parts = ServerParts(
        client=client,
        open_card=open_card,
        config=LiveConfig(config),
        listener=listener,
        on_ready=on_ready,
        started=started,
        fallbacks=fallbacks,
        prefill=prefill,
    )
    try:
        return run_loop(_serve_until_signal(parts))
    finally:
        listener.close()
        if config.uds is not None:
            Path(config.uds).unlink(missing_ok=True)


def num_http_workers(device: Device) -> int:
    """The default of --http-workers. On a CPU, more processes would take the engine's cores.

    Decided before the engine's process knows its device: importing torch here would take seconds.
    """
    if runs_on_cpu(device):
        return 1
    return min(_MAX_DEFAULT_WORKERS, max(1, (os.cpu_count() or 1) // _CORES_PER_WORKER))


class ExitDeadline:
    """Calls `force_exit` at the second signal, or `seconds()` after the first.

    The thread starts now: a signal handler can run at a point where no thread can be started.
    """

    def __init__(self, seconds: Callable[[], float], force_exit: Callable[[], None]) -> None:
        self._seconds = seconds
        self._force_exit = force_exit
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()
        threading.Thread(target=self._wait, name="windlass-exit", daemon=True).start()

    def on_signal(self) -> None:
        """Count a signal. Safe to call from a signal handler."""
        self._signals.put(None)

    def _wait(self) -> None:
        self._signals.get()
        with contextlib.suppress(queue.Empty):
            self._signals.get(timeout=self._seconds())
        self._force_exit()


async def _serve_until_signal(parts: ServerParts) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def force_exit() -> None:
        _log.error("forced exit: a second signal arrived, or the shutdown took too long")
        for client in parts.clients:
            client.kill()
        os._exit(1)

    deadline = ExitDeadline(lambda: parts.config.value.shutdown_timeout + _EXIT_GRACE_S, force_exit)

    # Not loop.add_signal_handler: the event loop never runs its handlers while it is blocked.
    def on_signal(_number: int, _frame: object) -> None:
        deadline.on_signal()
        loop.call_soon_threadsafe(stop.set)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    if hasattr(signal, "SIGHUP"):
        _reload_on_hangup(lambda: loop.call_soon_threadsafe(parts.reloads.request), on_signal)
    return await serve_until(stop, parts)


def _reload_on_hangup(
    reload: Callable[[], object], on_terminal_closed: Callable[[int, object], None]
) -> None:
    """Call `reload` at SIGHUP, unless it means that the terminal of the server was closed."""
    # nohup ignores SIGHUP, so that a closed terminal does not end the process.
    ends_with_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _has_terminal()

    def on_hangup(number: int, frame: object) -> None:
        if ends_with_terminal and not _has_terminal():
            on_terminal_closed(number, frame)
        else:
            reload()

    signal.signal(signal.SIGHUP, on_hangup)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


async def serve_until(stop: asyncio.Event, parts: ServerParts) -> int:
    """Start the engine and serve until `stop` is set or the engine has failed for good."""
    engine = asyncio.create_task(_start(parts.clients))
    # The engine processes start now and import their modules while this process does the same.
    await asyncio.sleep(0)  # runs `start`, which makes a task per replica
    await asyncio.sleep(0)  # runs these tasks
    try:
        card = parts.open_card()
        await asyncio.sleep(0)  # sends the build to the engine processes
        from windlass.serve.fallback_chain import FallbackEngine
        from windlass.serve.server import Server

        server = Server(
            parts.client,
            card,
            config=parts.config,
            started=parts.started,
            listener=parts.listener,
            reloads=parts.reloads,
            prefill=parts.prefill,
            fallback_engines=[
                FallbackEngine(
                    step=each.step,
                    client=each.client,
                    card=None if each.open_card is None else each.open_card(),
                )
                for each in parts.fallbacks
            ],
        )
    except BaseException:
        engine.cancel()
        await asyncio.gather(engine, return_exceptions=True)
        for client in parts.clients:
            await client.close()
        raise
    return await server.run(engine, parts.on_ready, stop)


async def _start(clients: Sequence[EngineHandle]) -> EngineReport:
    """Start the engines one after the other: each measures the memory that is left."""
    own, *others = clients
    report = await own.start()
    for client in others:
        await client.start()
    return report
