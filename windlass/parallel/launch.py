"""Starts ranks of a replica as processes, watches them, and ends them.

Rank 0 is the engine's own process (`Ranks`). Each other rank of its machine is a process with a link, a
socket: rank 0 sends commands through it (channel.py), the rank sends replies and heartbeats. A further
machine has one link for all its ranks (rendezvous.py, node.py). A closed link is a dead rank or machine,
a silent one hangs; either takes the replica down. A rank ends when its link is closed.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import queue
import select
import socket
import tempfile
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec

from windlass import errors
from windlass.child_process import start_child
from windlass.config import ParallelConfig
from windlass.errors import EngineError, WorkerDied
from windlass.handshake import send_frame
from windlass.machine.posix import need_posix
from windlass.parallel.channel import Sender, make_ring
from windlass.parallel.place import Place, StoreFile, StoreServer
from windlass.parallel.rank_process import (
    BUILT,
    HEARTBEAT_S,
    BuildRank,
    Failed,
    Reply,
    rank_main,
    read_report,
)
from windlass.parallel.rendezvous import Master, Nodes, Start
from windlass.parallel.segment import Exchange

_log = logging.getLogger("windlass.parallel")

_SILENT_S = 3.0  # without a heartbeat, a rank hangs
_STALL_S = 1.0  # this process did not run for so long: ranks may not have run either
_BLAME_S = 2 * HEARTBEAT_S  # the loss of another rank may be the reason of a failure
_EXIT_GRACE_S = 1.0  # for the step in progress to raise
_LOADING_GRACE_S = 3.0  # for a build in progress to raise
_JOIN_S = 5.0

_decode = msgspec.msgpack.Decoder(Failed | Reply).decode


@dataclass(slots=True)
class _Link:
    """To a rank of this machine (`process`), or to another machine."""

    socket: socket.socket
    name: str
    process: BaseProcess | None = None
    heard: float = 0.0
    failed: bool = False  # it has reported an error, and ends


class RankProcesses(ABC):
    """The ranks that this process has started on its machine, each with its link.

    `heard_from` and `lost_all` are for subclasses; the watching thread calls them.
    """

    def __init__(
        self, parallel: ParallelConfig, prepare: Callable[[], None], ranks: range, owner: str
    ) -> None:
        """Start the processes, which call `prepare` and wait for a build. `owner`: for messages."""
        self._owner = owner
        self._where = f" on {owner}" if parallel.node_rank else ""
        self._ranks = ranks
        tp, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        own = parallel.node_ranks
        self._exchanges = {
            stage: Exchange.of(tp)
            for stage in range(stages)
            if stage * tp in own and (stage + 1) * tp - 1 in own
        }
        self._tp = tp
        need_posix("An engine with several ranks", "select.poll")
        pairs = [socket.socketpair() for _ in ranks]
        self._near = [own for own, _ in pairs]
        self._segment = make_ring(len(ranks))
        self._sender = Sender(self._segment, self._near)
        self.failure: EngineError | None = None
        self._suspect: tuple[float, EngineError] | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._unbuilt = self._expected()
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._links: list[_Link] = []
        self._poll = select.poll()
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

    def _expected(self) -> set[int]:
        """The ranks whose replies arrive here."""
        return set(self._ranks)

    def _send_build(self, build: BuildRank, place: Place) -> None:
        for rank, pipe in zip(self._ranks, self._pipes, strict=True):
            with contextlib.suppress(BrokenPipeError):  # the watcher notices its death
                pipe.send((build, replace(place, rank=rank, exchange=None)))
                pipe.close()

    def check(self) -> None:
        """Raise if a rank is lost."""
        if self.failure is not None:
            raise self.failure

    def lost(self, error: BaseException) -> EngineError:
        """The error to raise after a command failed here: the ranks cannot go on either."""
        # The end of a rank may be the reason, and be noticed a little later.
        deadline = time.monotonic() + _BLAME_S + 2 * HEARTBEAT_S
        while self.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if self.failure is None:
            self._fail(WorkerDied(f"{self._owner} failed: {type(error).__name__}: {error}"))
        assert self.failure is not None
        return self.failure

    @property
    def _built(self) -> bool:
        return not self._unbuilt

    def close(self) -> None:
        """End the ranks."""
        if self._closed:
            return
        self._closed = True
        for link in self._near:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        if self._watcher is not threading.current_thread():
            self._watcher.join(_JOIN_S)
        self.end_processes()
        for link in self._near:
            link.close()

    def end_processes(self) -> None:
        """Wait for the processes, whose links are closed, and kill those that do not end."""
        for process in self._processes:
            if process.is_alive():
                process.join(0.5)
                process.kill()
            process.join(_JOIN_S)

    # ---- the watching thread -------------------------------------------------------------------

    def start(self, prepare: Callable[[], None], ends: Sequence[socket.socket]) -> None:
        """Start the processes; `ends`: their ends of the links."""
        spawn = multiprocessing.get_context("spawn")
        for index, end in enumerate(ends):
            receiver, pipe = spawn.Pipe(duplex=False)
            with receiver, end:
                process = spawn.Process(
                    target=rank_main,
                    args=self.session(prepare, receiver, end=end, index=index),
                    name=f"windlass-rank-{self._ranks[index]}",
                    daemon=True,
                )
                start_child(process)
            self._processes.append(process)
            self._pipes.append(pipe)
            name = f"rank {self._ranks[index]}{self._where}"
            self.watch_link(_Link(self._near[index], name, process))

    def watch_link(self, link: _Link) -> None:
        link.heard = time.monotonic()
        self._links.append(link)
        self._poll.register(link.socket, select.POLLIN)

    def session(
        self, prepare: Callable[[], None], setup: Connection, end: socket.socket, index: int
    ) -> tuple[Any, ...]:
        """The arguments of `run_rank`."""
        exchange = self._exchanges.get(self._ranks[index] // self._tp)
        return prepare, setup, end, (self._segment, len(self._ranks), index), exchange

    def watch(self, ready: Sequence[int]) -> bool:
        """Read the links that have something to read, and look for silent ranks; False: all ended."""
        now = time.monotonic()
        stalled = now - self._ticked > _STALL_S
        self._ticked = now
        for link in [link for link in self._links if not link.failed]:
            # A rank that loads weights may hold the interpreter; another machine's process does not.
            if stalled or (link.process is not None and not self._built):
                link.heard = now
            if link.socket.fileno() in ready:
                link.heard = now
                if not self._read(link) and not self._closed:
                    self._fail(WorkerDied(_describe_end(link)))
            elif (silent := now - link.heard) > _SILENT_S:
                self._fail(WorkerDied(f"{link.name} hangs: no heartbeat for {silent:.1f} s."))
        if self._suspect is not None and now - self._suspect[0] > _BLAME_S:
            self._fail(self._suspect[1])
        return not self._closed and self.failure is None

    def _read(self, link: _Link) -> bool:
        """Take one report of a link; False: it is closed."""
        report = read_report(link.socket)
        if report is None:
            return False
        rank, frame = report
        if not frame:
            return True
        try:
            message = _decode(frame)
        except msgspec.DecodeError as error:
            self._fail(EngineError(f"a message of {link.name} cannot be decoded: {error}."))
            return True
        if isinstance(message, Failed):
            link.failed = True
            self._poll.unregister(link.socket)
            self._blame(rank, message)
            return True
        if message.value == BUILT:
            self._unbuilt.discard(rank)
        self.heard_from(rank, frame, message)
        return True

    def _blame(self, rank: int, failed: Failed) -> None:
        """Take the error of a rank. One that is not Windlass' own waits: another rank may be lost."""
        kind = getattr(errors, failed.kind, None)
        if isinstance(kind, type) and issubclass(kind, EngineError):
            self._fail(kind(failed.text))
        elif self._suspect is None:
            text = f"rank {rank}{self._where}: {failed.text}"
            self._suspect = time.monotonic(), EngineError(text)

    @abstractmethod
    def heard_from(self, rank: int, frame: bytes, reply: Reply) -> None:
        """A rank has replied; `frame` is the reply as it was sent."""

    @abstractmethod
    def lost_all(self, error: EngineError) -> None:
        """The ranks have ended because of `error`."""

    def _fail(self, error: EngineError) -> None:
        with self._lock:
            if self.failure is not None or self._closed:
                return
            self.failure = error
        _log.error("%s The replica ends.", error)
        for process in self._processes:
            process.kill()
        for exchange in self._exchanges.values():
            exchange.set_lost()
        self.lost_all(error)


class Ranks(RankProcesses):
    """The other ranks, as rank 0 sees them.

    `master`: how further machines join, if there are any. `exit_when_lost`: end this process soon after
    a rank is lost, also between steps.
    """

    def __init__(
        self,
        parallel: ParallelConfig,
        prepare: Callable[[], None],
        *,
        exit_when_lost: bool = False,
        master: Master | None = None,
    ) -> None:
        self._exit_when_lost = exit_when_lost
        # End what waits on a GPU for other ranks; a process that exits needs none.
        self.interrupts: list[Callable[[], None]] = []
        self._nodes = None if master is None else Nodes(master, parallel)
        self._folder = tempfile.TemporaryDirectory(prefix="windlass-ranks-")
        self._replies = {rank: queue.SimpleQueue[Reply]() for rank in range(1, parallel.num_ranks)}
        self._far: list[socket.socket] = []
        super().__init__(parallel, prepare, range(1, parallel.ranks_per_node), "rank 0")
        self.place = Place(0, parallel, store=self._store(), exchange=self._exchanges.get(0))

    def _expected(self) -> set[int]:
        return set(self._replies)

    def _store(self) -> StoreFile | StoreServer:
        if self._nodes is None:
            return StoreFile(os.path.join(self._folder.name, "store"))
        address = self._nodes.listener.getsockname()[0]
        listener = socket.create_server((address, 0), family=self._nodes.listener.family)
        port = listener.getsockname()[1]
        return StoreServer(address, port, own_address=address, listener=listener.detach())

    def build(self, build: BuildRank) -> None:
        """Send every rank its build function, when all machines have joined."""
        place = self.place
        if self._nodes is not None and isinstance(place.store, StoreServer):
            for node in self._nodes.wait(self.check):
                send_frame(node.link, Start(place.store.port))
                self._far.append(node.link)
                self.watch_link(_Link(node.link, node.name))
            self._sender = Sender(self._segment, self._near, self._far)
            place = replace(place, store=replace(place.store, listener=None))
        self._send_build(build, place)

    def wait_until_ready(self) -> None:
        """Wait until every rank is ready to meet the others, or is built; raises the first error."""
        for rank in self._replies:
            self.reply(rank)

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
        return [self.reply(rank) for rank in self._replies]

    def reply(self, rank: int) -> bytes:
        """The next reply of a rank."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._replies[rank].get(timeout=HEARTBEAT_S).value
            self.check()

    def close(self, reason: str = "") -> None:
        """End the ranks. `reason`: why, for other machines; empty: as intended."""
        if not self._closed:
            self._end_nodes(reason or str(self.failure or ""))
            super().close()
            if self._nodes is not None:
                self._nodes.close()
            self._folder.cleanup()

    # ---- the watching thread -------------------------------------------------------------------

    def start(self, prepare: Callable[[], None], ends: Sequence[socket.socket]) -> None:
        super().start(prepare, ends)
        if self._nodes is not None:
            self._poll.register(self._nodes.listener, select.POLLIN)

    def watch(self, ready: Sequence[int]) -> bool:
        if self._nodes is not None and self._nodes.listener.fileno() in ready:
            self._nodes.accept()
        return super().watch(ready)

    def heard_from(self, rank: int, frame: bytes, reply: Reply) -> None:
        del frame
        self._replies[rank].put(reply)

    def _end_nodes(self, reason: str) -> None:
        if self._nodes is not None:
            self._nodes.ended = True
            self._sender.end(reason)

    def lost_all(self, error: EngineError) -> None:
        self._end_nodes(str(error))
        for link in self._far:  # also ends a send that waits for another machine
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        if not self._exit_when_lost:
            for interrupt in self.interrupts:
                interrupt()
            return
        # While this rank is built, a lost rank of its machine makes it raise an error to report; one of
        # another machine may leave it waiting for a connection.
        if not self._built and not self._far:
            return
        deadline = time.monotonic() + (_EXIT_GRACE_S if self._built else _LOADING_GRACE_S)
        while time.monotonic() < deadline:
            if self._closed and not self._built:  # the error is being reported
                return
            time.sleep(0.05)
        os._exit(1)


def _start_and_watch(
    owner: weakref.ref[RankProcesses],
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
        ready = [descriptor for descriptor, _ in poll.poll(1000 * HEARTBEAT_S)]
        ranks = owner()
        if ranks is not None and not ranks.watch(ready):
            return


def _close(owner: weakref.ref[RankProcesses]) -> None:
    ranks = owner()
    if ranks is not None:
        ranks.close()


def _describe_end(link: _Link) -> str:
    process = link.process
    if process is None:
        return f"{link.name} has closed its connection: its process ended, or its network failed."
    process.join(_JOIN_S)
    code = process.exitcode
    if code is not None and code < 0:
        return f"{link.name} was ended by signal {-code}."
    return f"{link.name} ended with exit code {code}; see its log."
