"""The process of a rank: builds it, handles rank 0's commands, and reports replies and heartbeats.

A rank ends when its link is closed, and with the process that started it (launch.py).
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import msgspec

from windlass.child_process import die_with_parent, dump_stacks_on_signal, ignore_signals
from windlass.errors import EngineError
from windlass.parallel.channel import Receiver
from windlass.parallel.place import Place
from windlass.parallel.segment import Exchange, Segment
from windlass.sockets import receive_exactly

_log = logging.getLogger("windlass.parallel")

HEARTBEAT_S = 0.25
BUILT = b"built"
_HEADER = struct.Struct("<II")  # the bytes that follow, and the rank; no bytes: a heartbeat


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """A rank could not be built, a command failed, or a machine lost a rank."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: Exception) -> Failed:
        known = isinstance(error, EngineError)
        name = type(error).__name__
        return cls(name, str(error) if known else f"{name}: {error}")

    def encoded(self) -> bytes:
        return msgspec.msgpack.encode(self)


class Reply(msgspec.Struct, tag="reply", frozen=True):
    """A rank is ready to meet the others, has been built, or has handled a command."""

    value: bytes = b""


# Handles one command, and returns its reply or None.
Handler = Callable[[bytes], bytes | None]
# Builds a rank. It calls its second argument before it waits for other ranks for the first time.
BuildRank = Callable[[Place, Callable[[], object]], Handler]


class Reports:
    """The way back through a link: frames of ranks, and heartbeats. Any thread may send."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._lock = threading.Lock()

    def send(self, rank: int, frame: bytes = b"") -> bool:
        """False: the other end is closed."""
        try:
            with self._lock:
                self._link.sendall(_HEADER.pack(len(frame), rank) + frame)
        except OSError:
            return False
        return True

    def start_heartbeat(self) -> None:
        """Send heartbeats until the link is closed."""

        def beat() -> None:
            while self.send(0):
                time.sleep(HEARTBEAT_S)

        threading.Thread(target=beat, name="windlass-heartbeat", daemon=True).start()


def read_report(link: socket.socket) -> tuple[int, bytes] | None:
    """The next rank and frame of a link, empty for a heartbeat; None: the link is closed."""
    header = receive_exactly(link, _HEADER.size)
    if header is None:
        return None
    length, rank = _HEADER.unpack(header)
    frame = receive_exactly(link, length)
    return None if frame is None else (rank, frame)


def rank_main(*session: Any) -> NoReturn:
    """Main function of a rank's process."""
    die_with_parent()
    ignore_signals()  # rank 0's parent handles them
    dump_stacks_on_signal()
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
    exchange: Exchange | None,
) -> None:
    """Build a rank, then handle commands until rank 0 closes the link."""
    prepare()
    build, place = setup.recv()
    place = replace(place, exchange=exchange)
    reports = Reports(link)

    def send(message: Failed | Reply) -> None:
        reports.send(place.rank, msgspec.msgpack.encode(message))

    receiver = Receiver(link, ring)
    try:
        handle = build(place, lambda: send(Reply()))
        send(Reply(BUILT))
        reports.start_heartbeat()
        while (message := receiver.receive()) is not None:
            reply = handle(message)
            if reply is not None:
                send(Reply(reply))
    except Exception as error:  # process boundary: reported to rank 0
        if not isinstance(error, EngineError):
            _log.exception("a rank failed")
        send(Failed.of(error))
        link.shutdown(socket.SHUT_WR)
        raise SystemExit(1) from error
