"""A machine beside node 0: starts its ranks when node 0's engine starts, and relays their messages.

A command of rank 0 arrives once, and goes to the ranks of this machine through shared memory. When the
engine of node 0 ends, so do the ranks, and this process waits for the next engine, until the server of
node 0 has ended. It imports no torch.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from windlass.config import ParallelConfig
from windlass.errors import EngineError, WorkerDied
from windlass.handshake import Identity, receive_frame
from windlass.parallel.channel import Receiver
from windlass.parallel.launch import RankProcesses
from windlass.parallel.place import Place, StoreServer
from windlass.parallel.rank_process import BUILT, BuildRank, Failed, Reply, Reports
from windlass.parallel.rendezvous import MasterGone, Start, identify, join_master

_log = logging.getLogger("windlass.parallel")


@dataclass(frozen=True, slots=True)
class NodeWork:
    """What a machine computes: `prepare` and `build` run in the processes of its ranks."""

    parallel: ParallelConfig
    prepare: Callable[[], None]
    build: BuildRank


class _Stopped(Exception):
    """A signal asked this process to end."""


class NodeRanks(RankProcesses):
    """The ranks of a machine, which reports their replies to node 0."""

    def __init__(self, work: NodeWork, reports: Reports, link: socket.socket) -> None:
        parallel = work.parallel
        self._reports = reports
        self._link = link
        owner = f"node {parallel.node_rank}"
        super().__init__(parallel, work.prepare, parallel.node_ranks, owner)

    def build(self, work: NodeWork, start: Start) -> None:
        store = StoreServer(
            address=self._link.getpeername()[0],
            port=start.store_port,
            own_address=self._link.getsockname()[0],
        )
        self._send_build(work.build, Place(0, work.parallel, store))

    def relay(self, message: bytes) -> None:
        """Send a command of rank 0 to the ranks."""
        try:
            self._sender.send(message, self.check)
        except OSError as error:
            raise self.lost(error) from error

    def heard_from(self, rank: int, frame: bytes, reply: Reply) -> None:
        self._reports.send(rank, frame)
        if reply.value == BUILT and self._built:
            _log.info("the ranks of %s are ready", self._owner)

    def lost_all(self, error: EngineError) -> None:
        self._reports.send(self._ranks[0], Failed.of(error).encoded())
        with contextlib.suppress(OSError):  # ends the wait for the next command
            self._link.shutdown(socket.SHUT_RDWR)


def serve_node(work: NodeWork, facts: Mapping[str, str]) -> int:
    """Run ranks for the engines of node 0, one after another; returns the exit code.

    Raises when node 0 cannot be reached, refuses this machine, or has ended after a failure.
    """
    identity = identify(work.parallel, facts)
    node = f"node {work.parallel.node_rank}"
    try:
        with _signals():
            return _serve(work, identity, node)
    except _Stopped as stopped:
        _log.info("%s ends: %s", node, stopped)
        return 0


def _serve(work: NodeWork, identity: Identity, node: str) -> int:
    failure: str | None = None
    again = False
    while True:
        try:
            link = join_master(work.parallel, identity, again=again)
        except MasterGone as gone:
            if not failure:
                _log.info("%s ends: %s", node, gone)
                return 0
            raise WorkerDied(f"{node} ends: {gone}. Before that: {failure}") from gone
        again = True
        with link:
            failure = _serve_engine(work, link)
        _log.log(
            logging.ERROR if failure else logging.INFO,
            "%s has ended its ranks: %s %s waits for node 0's next start.",
            node,
            failure or "the engine of node 0 ended.",
            node,
        )


def _serve_engine(work: NodeWork, link: socket.socket) -> str:
    """Run the ranks of one engine until it ends; returns how it failed, or an empty string."""
    start = receive_frame(link, Start)
    if start is None:
        return "node 0 closed the connection before its engine started."
    reports, receiver = Reports(link), Receiver(link)
    reports.start_heartbeat()
    ranks = NodeRanks(work, reports, link)
    try:
        ranks.build(work, start)
        while (message := receiver.receive()) is not None:
            ranks.relay(message)
    except EngineError as error:
        return str(error)
    except _Stopped as stopped:
        reason = WorkerDied(f"node {work.parallel.node_rank} ends: {stopped}.")
        reports.send(work.parallel.node_ranks[0], Failed.of(reason).encoded())
        raise
    finally:
        ranks.close()
    if ranks.failure is not None:
        return str(ranks.failure)
    if receiver.end_reason is None:
        return "the connection to node 0 is lost: its engine died, or the network failed."
    return receiver.end_reason


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Raise _Stopped at the first SIGINT or SIGTERM; the second one ends the process."""

    def stop(number: int, frame: object) -> None:
        del frame
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        raise _Stopped(f"it received {signal.Signals(number).name}")

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, stop)
    yield
