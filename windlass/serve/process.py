"""One engine process as the HTTP process sees it: start, messages, exit.

client.py knows its requests, and supervisor.py decides about restarts.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio

from windlass.child_process import DUMP_SIGNAL, children_that_dump, start_child
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
    ShardError,
    UnsupportedError,
    WorkerDied,
)
from windlass.serve import messages
from windlass.serve.journal import read_journal
from windlass.serve.loop import Build, Launch, Prepare, engine_main

_log = logging.getLogger("windlass.serve")

_LAST_MESSAGES_S = 0.1  # messages of a dying process may still be in transit
_DUMP_GAP_S = 0.1  # between the stacks of two processes, so that they are not mixed
_STOP_TIMEOUT_S = 5.0

_BUILD_ERRORS = {
    kind.__name__: kind
    for kind in (ConfigError, CheckpointError, ShardError, UnsupportedError, DownloadError)
}
_REFUSALS = (RequestError, CapacityError, AdapterNotFound, AdapterConflict)
_REQUEST_ERRORS = {kind.__name__: kind for kind in _REFUSALS}


def build_error(kind: str, message: str) -> EngineError:
    """Rebuild the error that ended the build, with its own class if that is known here."""
    return _BUILD_ERRORS.get(kind, EngineError)(message)


def refusal_error(kind: str, message: str, param: str | None) -> EngineError:
    """Rebuild the error with which the engine refused a request."""
    known = _REQUEST_ERRORS.get(kind)
    return known(message, param) if known is not None else EngineError(message)


class EngineProcess:
    """Owns the process and the socket to it. Created inside a running event loop.

    The process runs `prepare` and then waits for `send_build`. `handle` gets every message after
    Ready, in order. All processes share one context: libzmq aborts the HTTP process when it cannot
    open the descriptors of a new context, while a socket that cannot be opened is an error.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        launch: Launch,
        *,
        prepare: Prepare,
        handle: Callable[[messages.FromEngine], None],
    ) -> None:
        self._handle = handle
        self._journal = launch.journal
        self._loop = asyncio.get_running_loop()
        self._outgoing: list[messages.ToEngine] = []
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
            receiver, self._build_pipe = spawn.Pipe(duplex=False)
            undo.callback(self._build_pipe.close)
            with receiver:
                self._process = spawn.Process(
                    target=engine_main, args=(launch, prepare, receiver), name="windlass-engine"
                )
                start_child(self._process)
            undo.pop_all()
        # Without this an interpreter that exits on an error would wait for the engine forever.
        atexit.register(self._process.kill)
        threading.Thread(target=self._watch, daemon=True).start()
        self._reader = asyncio.create_task(self._read())
        self._reader.add_done_callback(self._reader_done)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def _watch(self) -> None:
        """Wait for the exit in a thread: a child of the engine could keep a pipe's end open."""
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
        """Kill an engine whose messages cannot be decoded."""
        if not reader.cancelled():
            _log.error("a message of the engine could not be decoded", exc_info=reader.exception())
            self.kill()

    def send_build(self, build: Build) -> None:
        """Send the process its build function."""
        with self._build_pipe, contextlib.suppress(BrokenPipeError):  # `ended` notices its death
            self._build_pipe.send(build)

    async def ready(self) -> EngineReport:
        """Wait until the engine is built; raises the build's error."""
        ended = asyncio.create_task(self.ended())
        either: set[asyncio.Future[Any]] = {self._ready, ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if self._ready.done():
            return self._ready.result()
        raise WorkerDied(f"{self.describe_exit()} while the model was being loaded; see its log.")

    async def ended(self) -> None:
        """Wait until the process has exited and its last messages were handled."""
        await self._dead.wait()
        await asyncio.wait({self._reader}, timeout=_LAST_MESSAGES_S)

    def describe_exit(self) -> str:
        code = self._exit_code
        if code is not None and code < 0:
            return f"the engine process was ended by signal {-code}"
        return f"the engine process ended with exit code {code}"

    def running(self) -> frozenset[bytes]:
        """The fingerprints of the requests that the process is running, or was when it died."""
        return read_journal(self._journal)

    def send(self, *batch: messages.ToEngine) -> None:
        """Send without waiting, with all other messages of this turn of the event loop.

        Admission control bounds the queue to the engine.
        """
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing += batch

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if self._socket.closed:
            return
        sent = asyncio.ensure_future(self._socket.send(messages.encode(outgoing), zmq.NOBLOCK))
        # Sending fails only when the engine process is dead, which `ended` notices.
        sent.add_done_callback(lambda future: future.exception())

    async def close(self) -> None:
        """Stop the process, kill it after a timeout, and free the socket."""
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
            self._ready.exception()  # read, so that asyncio does not report an unused exception
        self._socket.close()
        self._build_pipe.close()
        self._process.close()  # closes two pipes that would otherwise wait for the garbage collector
        self._journal.unlink(missing_ok=True)

    async def dump_stacks(self) -> None:
        """Log the stacks of all threads, then those of the other ranks of this machine.

        A stopped process logs them when it is continued.
        """
        if DUMP_SIGNAL is None or self._process.pid is None:
            return
        self._signal(DUMP_SIGNAL)
        for rank in children_that_dump(self._process.pid):
            await asyncio.sleep(_DUMP_GAP_S)
            _log.error("the stacks of rank process %d follow", rank)
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(rank, DUMP_SIGNAL)

    def resume(self) -> None:
        """Continue a stopped process."""
        if hasattr(signal, "SIGCONT"):  # Windows stops no processes
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process.pid is not None and not self._dead.is_set():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
