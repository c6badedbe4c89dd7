"""One life of the engine's process, seen from the server: start, messages, end.

What requests are in it, and whether it is started again, is the client's business.
"""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import zmq
import zmq.asyncio

from windlass import errors
from windlass.core.card import EngineReport
from windlass.errors import EngineError, WorkerDied
from windlass.serve import messages
from windlass.serve.loop import Build, engine_main

_LAST_WORDS_MS = 100  # what a dying process sent may still be on its way
_STOP_TIMEOUT_S = 5.0


def error_of(kind: str, message: str, param: str | None = None) -> EngineError:
    """The error that the other process raised, as the same class when it is one of ours."""
    known = getattr(errors, kind, EngineError)
    if isinstance(known, type) and issubclass(known, errors.RequestError):
        return known(message, param)
    if known in (errors.ConfigError, errors.CheckpointError, errors.UnsupportedError):
        return EngineError.__new__(known, message)
    return errors.DownloadError(message) if known is errors.DownloadError else EngineError(message)


class EngineProcess:
    """Owns the process and the socket to it. Made inside a running event loop."""

    def __init__(self, build: Build, socket_path: Path, hang_timeout: float) -> None:
        address = f"ipc://{socket_path}"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        spawn = multiprocessing.get_context("spawn")
        self._process = spawn.Process(
            target=engine_main, args=(address, build, hang_timeout), name="windlass-engine"
        )
        self._loop = asyncio.get_running_loop()
        self._dead = asyncio.Event()
        self._process.start()
        # Without this an interpreter that ends by an error would wait for the engine forever.
        atexit.register(self._process.kill)
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def _watch(self) -> None:
        """Wait for the end in a thread: a child of the engine could keep a pipe's end open."""
        self._process.join()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._dead.set)

    @property
    def how_it_ended(self) -> str:
        code = self._process.exitcode
        if code is None:
            return "the engine process is running"
        if code < 0:
            return f"the engine process was ended by signal {-code}"
        return f"the engine process ended with exit code {code}"

    async def ready(self) -> EngineReport:
        """Wait until the engine is built; raises what the build raised."""
        async for message in self.messages():
            if isinstance(message, messages.Ready):
                return message.report
            if isinstance(message, messages.Failed):
                raise error_of(message.kind, message.message)
        raise WorkerDied(f"{self.how_it_ended} while the model was being loaded; see its log.")

    def send(self, batch: Sequence[messages.ToEngine]) -> None:
        """Send without waiting: the queue to the engine is bounded by admission, not here."""
        if not self._dead.is_set():
            self._socket.send(messages.encode(batch), zmq.NOBLOCK)

    async def messages(self) -> AsyncIterator[messages.FromEngine]:
        """What the engine says, to its last word; ends when the process has ended."""
        dead = asyncio.ensure_future(self._dead.wait())
        try:
            while not dead.done():
                frame = asyncio.ensure_future(self._socket.recv())
                await asyncio.wait({frame, dead}, return_when=asyncio.FIRST_COMPLETED)
                if not frame.done():
                    frame.cancel()
                    break
                for message in messages.decode_from_engine(frame.result()):
                    yield message
            while await self._socket.poll(_LAST_WORDS_MS):
                for message in messages.decode_from_engine(await self._socket.recv()):
                    yield message
        finally:
            dead.cancel()

    async def close(self) -> None:
        """Ask it to end, insist after a while, and free the socket."""
        if not self._dead.is_set():
            self.send([messages.Stop()])
            try:
                await asyncio.wait_for(self._dead.wait(), _STOP_TIMEOUT_S)
            except TimeoutError:
                self.kill()
                await self._dead.wait()
        atexit.unregister(self._process.kill)
        self._socket.close()
        self._context.term()

    def kill(self) -> None:
        self._process.kill()
