"""One life of the engine's process, seen from the server: start, messages, end.

What requests are in it, and whether it is started again, is the client's business.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio

from windlass.core.card import EngineReport
from windlass.errors import (
    AdapterConflict,
    AdapterNotFound,
    CapacityError,
    CheckpointError,
    ConfigError,
    DownloadError,
    EngineError,
    RequestError,
    UnsupportedError,
    WorkerDied,
)
from windlass.serve import messages
from windlass.serve.journal import read_journal
from windlass.serve.loop import Build, Launch, Prepare, engine_main

_log = logging.getLogger("windlass.serve")

_LAST_WORDS_S = 0.1  # what a dying process sent may still be on its way
_STOP_TIMEOUT_S = 5.0

_BUILD_ERRORS = {
    kind.__name__: kind for kind in (ConfigError, CheckpointError, UnsupportedError, DownloadError)
}
_REFUSALS = (RequestError, CapacityError, AdapterNotFound, AdapterConflict)
_REQUEST_ERRORS = {kind.__name__: kind for kind in _REFUSALS}


def build_error(kind: str, message: str) -> EngineError:
    """The error that ended the build, as the class it was raised as when that is one of ours."""
    return _BUILD_ERRORS.get(kind, EngineError)(message)


def refusal_error(kind: str, message: str, param: str | None) -> EngineError:
    """The error with which the engine refused a request."""
    known = _REQUEST_ERRORS.get(kind)
    return known(message, param) if known is not None else EngineError(message)


class EngineProcess:
    """Owns the process and the socket to it. Made inside a running event loop.

    It runs `prepare` and then waits for `begin`. `handle` is called with every message after Ready,
    in order. The context outlives it: libzmq aborts the whole process when it cannot open the
    descriptors of a new one, while a socket that cannot be opened is an error.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        launch: Launch,
        prepare: Prepare,
        handle: Callable[[messages.FromEngine], None],
    ) -> None:
        self._handle = handle
        self._journal = launch.journal
        self._loop = asyncio.get_running_loop()
        self._dead = asyncio.Event()
        self._exit_code: int | None = None
        self._ready: asyncio.Future[EngineReport] = self._loop.create_future()
        with contextlib.ExitStack() as undo:
            self._socket = context.socket(zmq.PAIR)
            undo.callback(self._socket.close)
            self._socket.set_hwm(0)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.bind(launch.address)
            spawn = multiprocessing.get_context("spawn")
            its_orders, self._orders = spawn.Pipe(duplex=False)
            undo.callback(self._orders.close)
            with its_orders:
                self._process = spawn.Process(
                    target=engine_main, args=(launch, prepare, its_orders), name="windlass-engine"
                )
                self._process.start()
            undo.pop_all()
        # Without this an interpreter that ends by an error would wait for the engine forever.
        atexit.register(self._process.kill)
        threading.Thread(target=self._watch, daemon=True).start()
        self._reader = asyncio.create_task(self._read())
        self._reader.add_done_callback(self._reader_done)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def _watch(self) -> None:
        """Wait for the end in a thread: a child of the engine could keep a pipe's end open."""
        self._process.join()
        self._exit_code = self._process.exitcode
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._dead.set)

    async def _read(self) -> None:
        while True:
            for message in messages.decode_from_engine(await self._socket.recv()):
                match message:
                    case messages.Ready(report):
                        self._ready.set_result(report)
                    case messages.Failed(kind, text):
                        self._ready.set_exception(build_error(kind, text))
                    case _:
                        self._handle(message)

    def _reader_done(self, reader: asyncio.Task[None]) -> None:
        """An engine that cannot be understood any more is as good as dead."""
        if not reader.cancelled():
            _log.error("a message of the engine could not be read", exc_info=reader.exception())
            self.kill()

    def begin(self, build: Build) -> None:
        """Tell the process what to build."""
        with self._orders, contextlib.suppress(BrokenPipeError):  # its death is noticed elsewhere
            self._orders.send(build)

    async def ready(self) -> EngineReport:
        """Wait until the engine is built; raises what the build raised."""
        ended = asyncio.create_task(self.ended())
        either: set[asyncio.Future[Any]] = {self._ready, ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if self._ready.done():
            return self._ready.result()
        raise WorkerDied(f"{self.how_it_ended()} while the model was being loaded; see its log.")

    async def ended(self) -> None:
        """Wait until the process has ended and its last words were handled."""
        await self._dead.wait()
        await asyncio.wait({self._reader}, timeout=_LAST_WORDS_S)

    def how_it_ended(self) -> str:
        code = self._exit_code
        if code is not None and code < 0:
            return f"the engine process was ended by signal {-code}"
        return f"the engine process ended with exit code {code}"

    def running(self) -> frozenset[bytes]:
        """The fingerprints of the requests that the process works on, or died of."""
        return read_journal(self._journal)

    def send(self, *batch: messages.ToEngine) -> None:
        """Send without waiting; the queue to the engine is bounded by admission, not here."""
        sent = asyncio.ensure_future(self._socket.send(messages.encode(batch), zmq.NOBLOCK))
        # It fails only when the other end is gone, and that is noticed by its death.
        sent.add_done_callback(lambda future: future.exception())

    async def close(self) -> None:
        """Ask the process to end, insist after a while, and free the socket."""
        if not self._dead.is_set():
            self.send(messages.Stop())
            try:
                await asyncio.wait_for(self._dead.wait(), _STOP_TIMEOUT_S)
            except TimeoutError:
                self.kill()
                await self._dead.wait()
        atexit.unregister(self._process.kill)
        self._reader.cancel()
        await asyncio.wait({self._reader})
        if self._ready.done():
            self._ready.exception()  # read, so that an unused failure is not reported as forgotten
        self._socket.close()
        self._orders.close()
        self._process.close()  # its two pipes, which otherwise wait for the garbage collector
        self._journal.unlink(missing_ok=True)

    def kill(self) -> None:
        self._process.kill()
