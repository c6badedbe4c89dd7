"""Starts the other ranks of a replica, watches them, and ends them.

Rank 0 is the engine's own process. Each other rank is a process with a link, a socket: rank 0 sends
commands through it (channel.py), the rank sends replies and heartbeats. A closed link is a dead rank, a
silent one a rank that hangs; either takes the replica down. A rank ends when its link is closed.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import queue
import select
import signal
import socket
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import msgspec

from windlass import errors
from windlass.child_process import die_with_parent
from windlass.config import ParallelConfig
from windlass.errors import EngineError, WorkerDied
from windlass.parallel.channel import Receiver, Sender, make_ring, receive_exactly
from windlass.parallel.place import Place
from windlass.parallel.segment import Exchange, Segment

_log = logging.getLogger("windlass.parallel")

_HEARTBEAT_S = 0.25
_SILENT_S = 3.0  # without a heartbeat, a rank hangs
_STALL_S = 1.0  # this process did not run for so long: ranks may not have run either
_EXIT_GRACE_S = 1.0  # for the step in progress to raise
_JOIN_S = 5.0
_HEADER = struct.Struct("<I")


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """A rank could not be built, or a command failed."""

    kind: str
    text: str


class Reply(msgspec.Struct, tag="reply", frozen=True):
    """A rank is ready to meet the others, has been built, or has handled a command."""

    value: bytes = b""


_BUILT = b"built"


_decode = msgspec.msgpack.Decoder(Failed | Reply).decode


# Handles one command, and returns its reply or None.
Handler = Callable[[bytes], bytes | None]
# Builds a rank. It calls its second argument before it waits for other ranks for the first time.
BuildRank = Callable[[Place, Callable[[], object]], Handler]


class Ranks:
    """The other ranks, as rank 0 sees them.

    `exit_when_lost`: end this process soon after a rank is lost, also between steps.
    """

    def __init__(
        self,
        parallel: ParallelConfig,
        prepare: Callable[[], None],
        *,
        exit_when_lost: bool = False,
    ) -> None:
        """Start the processes, which call `prepare` and wait for `build`."""
        self._exit_when_lost = exit_when_lost
        self._folder = tempfile.TemporaryDirectory(prefix="windlass-ranks-")
        tp = parallel.tensor_parallel_size
        self._exchanges = [Exchange.of(tp) for _ in range(parallel.pipeline_parallel_size)]
        store = os.path.join(self._folder.name, "store")
        self.place = Place(0, parallel, store, self._exchanges[0])
        count = parallel.ranks_per_node - 1
        pairs = [socket.socketpair() for _ in range(count)]
        self._links = [own for own, _ in pairs]
        self._segment = make_ring(count)
        self._sender = Sender(self._segment, self._links)
        self._replies = [queue.SimpleQueue[Failed | Reply]() for _ in self._links]
        self._failure: EngineError | None = None
        self._lock = threading.Lock()
        self._on_loss: list[Callable[[], None]] = []
        self._closed = False
        self._built = False
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._poll = select.poll()
        self._heard = [0.0] * count
        self._ticked = 0.0
        started = threading.Event()
        # The kernel ends a rank with the thread that started it, which must therefore live on.
        self._watcher = threading.Thread(
            target=_start_and_watch,
            args=(weakref.ref(self), prepare, [other for _, other in pairs], started),
            name="windlass-ranks",
            daemon=True,
        )
        self._watcher.start()
        started.wait()
        # Before multiprocessing's own exit function, which would wait for the ranks.
        atexit.register(_close, weakref.ref(self))

    def __del__(self) -> None:
        self.close()

    def build(self, build: BuildRank) -> None:
        """Send every rank its build function."""
        for rank, pipe in enumerate(self._pipes, start=1):
            with contextlib.suppress(BrokenPipeError):  # the watcher notices its death
                pipe.send((build, replace(self.place, rank=rank, exchange=None)))
                pipe.close()

    def wait_until_ready(self) -> None:
        """Wait until every rank is ready to meet the others, or is built; raises the first error."""
        for index in range(len(self._links)):
            self._built = self._next_reply(index).value == _BUILT

    def when_lost(self, call: Callable[[], None]) -> None:
        """Call this from another thread when a rank is lost, to end waiting for it."""
        self._on_loss.append(call)

    def send(self, message: bytes) -> None:
        """Send a command to all ranks, which handle commands in order."""
        self.check()
        try:
            self._sender.send(message, self.check)
        except OSError as error:
            raise self.lost(error) from error

    def ask(self, message: bytes) -> list[bytes]:
        """Send a command and wait for the replies of all ranks."""
        self.send(message)
        return [self._next_reply(index).value for index in range(len(self._links))]

    def reply(self, rank: int) -> bytes:
        """The next reply of a rank."""
        return self._next_reply(rank - 1).value

    def check(self) -> None:
        """Raise if a rank is lost."""
        if self._failure is not None:
            raise self._failure

    def lost(self, error: BaseException) -> EngineError:
        """The error to raise after a command failed here: the other ranks cannot go on either."""
        deadline = time.monotonic() + 2 * _HEARTBEAT_S
        # The end of a rank may be the reason, and be noticed a little later.
        while self._failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._failure is None:
            self._fail(WorkerDied(f"rank 0 failed: {type(error).__name__}: {error}"))
        assert self._failure is not None
        return self._failure

    def close(self) -> None:
        """End the ranks."""
        if self._closed:
            return
        self._closed = True
        for link in self._links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        if self._watcher is not threading.current_thread():
            self._watcher.join(_JOIN_S)
        _end(self._processes)
        for link in self._links:
            link.close()
        self._folder.cleanup()

    # ---- the watching thread -------------------------------------------------------------------

    def start(self, prepare: Callable[[], None], ends: Sequence[socket.socket]) -> None:
        """Start the processes; `ends`: their ends of the links."""
        spawn = multiprocessing.get_context("spawn")
        for index, end in enumerate(ends):
            receiver, pipe = spawn.Pipe(duplex=False)
            with receiver, end:
                process = spawn.Process(
                    target=_rank_main,
                    args=self.session(prepare, receiver, end, index),
                    name=f"windlass-rank-{index + 1}",
                    daemon=True,
                )
                process.start()
            self._processes.append(process)
            self._pipes.append(pipe)
            self._poll.register(self._links[index], select.POLLIN)

    def session(
        self, prepare: Callable[[], None], setup: Connection, end: socket.socket, index: int
    ) -> tuple[Any, ...]:
        """The arguments of `run_rank`."""
        exchange = self._exchanges[(index + 1) // self.place.parallel.tensor_parallel_size]
        return prepare, setup, end, (self._segment, len(self._links), index), exchange

    def watch(self, ready: Sequence[int]) -> bool:
        """Read the links that have something to read, and look for silent ranks; False: all ended."""
        now = time.monotonic()
        if now - self._ticked > _STALL_S or not self._built:
            self._heard = [now] * len(self._heard)
        self._ticked = now
        for index, link in enumerate(self._links):
            if link.fileno() in ready:
                self._heard[index] = now
                if not self._read(index) and not self._closed:
                    self._fail(WorkerDied(self._describe_end(index)))
            elif (silent := now - self._heard[index]) > _SILENT_S:
                self._fail(WorkerDied(f"rank {index + 1} hangs: no heartbeat for {silent:.1f} s."))
        return not self._closed and self._failure is None

    def _read(self, index: int) -> bool:
        """Take one message of a link; False: it is closed."""
        header = receive_exactly(self._links[index], _HEADER.size)
        if header is None:
            return False
        (length,) = _HEADER.unpack(header)
        if length:
            frame = receive_exactly(self._links[index], length)
            if frame is None:
                return False
            message = _decode(frame)
            self._replies[index].put(message)
            if isinstance(message, Failed):
                self._fail(_rebuilt(message, index + 1))
        return True

    def _describe_end(self, index: int) -> str:
        process = self._processes[index]
        process.join(_JOIN_S)
        code = process.exitcode
        if code is not None and code < 0:
            return f"rank {index + 1} was ended by signal {-code}."
        return f"rank {index + 1} ended with exit code {code}; see its log."

    def _fail(self, error: EngineError) -> None:
        with self._lock:
            if self._failure is not None or self._closed:
                return
            self._failure = error
        _log.error("%s The replica ends.", error)
        for process in self._processes:
            process.kill()
        for exchange in self._exchanges:
            exchange.set_lost()
        for call in self._on_loss:
            call()
        if self._exit_when_lost and self._built:
            time.sleep(_EXIT_GRACE_S)
            os._exit(1)

    def _next_reply(self, index: int) -> Reply:
        while True:
            with contextlib.suppress(queue.Empty):
                message = self._replies[index].get(timeout=_HEARTBEAT_S)
                if isinstance(message, Reply):
                    return message
            self.check()


def _start_and_watch(
    owner: weakref.ref[Ranks],
    prepare: Callable[[], None],
    ends: Sequence[socket.socket],
    started: threading.Event,
) -> None:
    """The watching thread. It keeps no reference to the ranks while it waits."""
    ranks = owner()
    assert ranks is not None
    poll = ranks._poll
    try:
        ranks.start(prepare, ends)
    finally:
        started.set()
    while ranks is not None:
        del ranks
        ready = [descriptor for descriptor, _ in poll.poll(1000 * _HEARTBEAT_S)]
        ranks = owner()
        if ranks is not None and not ranks.watch(ready):
            return


def _close(owner: weakref.ref[Ranks]) -> None:
    ranks = owner()
    if ranks is not None:
        ranks.close()


def _rebuilt(failed: Failed, rank: int) -> EngineError:
    """The error of a rank, with its own class if it has no further arguments."""
    kind = getattr(errors, failed.kind, EngineError)
    return (
        kind(failed.text) if kind is not EngineError else EngineError(f"rank {rank}: {failed.text}")
    )


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.join(0.5)
            process.kill()
        process.join(_JOIN_S)


# ---- the rank's process ------------------------------------------------------------------------


def _rank_main(*session: Any) -> NoReturn:
    """Main function of a rank's process."""
    die_with_parent()
    # A terminal and a service manager signal the whole process group; rank 0's parent handles signals.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "0")
    code = 1
    try:
        run_rank(*session)
        code = 0
    except EOFError:  # rank 0 ended before it sent the build
        pass
    finally:
        os._exit(code)


def run_rank(
    prepare: Callable[[], None],
    setup: Connection,
    link: socket.socket,
    ring: tuple[Segment, int, int],
    exchange: Exchange,
) -> None:
    """Build a rank, then handle commands until rank 0 closes the link."""
    prepare()
    build, place = setup.recv()
    place = replace(place, exchange=exchange)
    serve_link(link, Receiver(link, ring), lambda ready: build(place, ready))


def serve_link(
    link: socket.socket, receiver: Receiver, build: Callable[[Callable[[], object]], Handler]
) -> None:
    """Build a rank and handle the commands of rank 0; reports errors to it."""
    lock = threading.Lock()

    def send(message: Failed | Reply | None) -> bool:
        """False: rank 0 has closed the link."""
        frame = b"" if message is None else msgspec.msgpack.encode(message)
        try:
            with lock:
                link.sendall(_HEADER.pack(len(frame)) + frame)
        except OSError:
            return False
        return True

    def beat() -> None:
        while send(None):
            time.sleep(_HEARTBEAT_S)

    try:
        handle = build(lambda: send(Reply()))
        send(Reply(_BUILT))
        threading.Thread(target=beat, daemon=True).start()
        while (message := receiver.receive()) is not None:
            reply = handle(message)
            if reply is not None:
                send(Reply(reply))
    except Exception as error:  # process boundary: reported to rank 0
        if not isinstance(error, EngineError):
            _log.exception("a rank failed")
        text = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
        send(Failed(type(error).__name__, text))
        link.shutdown(socket.SHUT_WR)
        raise SystemExit(1) from error
