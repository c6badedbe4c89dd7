"""Broadcasts messages from rank 0 to the other ranks.

On one machine a message lies once in a ring of shared memory, and a rank gets its length through its
link, a socket pair: a blocked read costs no core, and the system call orders the memory. Every other
machine has one link, through which the message follows its length; the machine writes it into its own
ring (node.py).
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Sequence

from windlass.parallel.segment import Segment
from windlass.sockets import receive_exactly

_LENGTH = struct.Struct("<I")
_CONSUMED = struct.Struct("<Q")
_MORE = 1 << 31  # in a length: a further piece of the message follows
_END = 1 << 30  # in a length: no message follows, and the piece says why
_LINE = 64  # bytes: every rank's counter has a cache line
_RING_BYTES = 16 * 2**20
_FULL_S = 0.00005  # pause while a rank has not read enough of the ring


def make_ring(num_readers: int, num_bytes: int = _RING_BYTES) -> Segment:
    """Shared memory for a ring of `num_bytes` that so many ranks read."""
    return Segment(num_readers * _LINE + num_bytes)


class _Ring:
    """The ring's bytes and the readers' counters. Positions count all bytes ever written."""

    def __init__(self, segment: Segment, num_readers: int) -> None:
        self._first = num_readers * _LINE
        self._map = segment.map
        self.num_bytes = segment.num_bytes - self._first

    def write(self, position: int, piece: memoryview) -> None:
        at = position % self.num_bytes
        head = min(len(piece), self.num_bytes - at)
        first = self._first
        self._map[first + at : first + at + head] = piece[:head]
        if head < len(piece):
            self._map[first : first + len(piece) - head] = piece[head:]

    def read(self, position: int, count: int) -> bytes:
        at, first = position % self.num_bytes, self._first
        head = min(count, self.num_bytes - at)
        found = self._map[first + at : first + at + head]
        return found if head == count else found + self._map[first : first + count - head]

    def consumed(self, reader: int) -> int:
        (found,) = _CONSUMED.unpack_from(self._map, reader * _LINE)
        return int(found)

    def set_consumed(self, reader: int, position: int) -> None:
        _CONSUMED.pack_into(self._map, reader * _LINE, position)


class Sender:
    """Owns the writing end. `near`: links to ranks on this machine, in the order of the ring's readers.

    `far`: links to other machines.
    """

    def __init__(
        self, segment: Segment, near: Sequence[socket.socket], far: Sequence[socket.socket] = ()
    ) -> None:
        self._ring = _Ring(segment, len(near))
        self._near, self._far = near, far
        self._position = 0

    def send(self, message: bytes, check: Callable[[], None]) -> None:
        """Send to all ranks. `check` raises if a rank is lost, on which this would wait for ever."""
        left, ring = memoryview(message), self._ring
        while True:
            piece, left = left[: ring.num_bytes // 2], left[ring.num_bytes // 2 :]
            header = _LENGTH.pack(len(piece) | (_MORE if left else 0))
            if self._near:
                self._wait_for_room(len(piece), check)
                ring.write(self._position, piece)
                self._position += len(piece)
            for link in self._near:
                link.sendall(header)
            for link in self._far:
                link.sendall(header + piece)
            if not left:
                return

    def end(self, reason: str) -> None:
        """Say why this is the end, without waiting; empty: as intended. Ranks of this machine need no reason."""
        piece = reason.encode()[: _END - 1]
        for link in self._far:
            with contextlib.suppress(
                OSError
            ):  # the link is broken, or full since the machine hangs
                link.send(_LENGTH.pack(len(piece) | _END) + piece, socket.MSG_DONTWAIT)

    def _wait_for_room(self, count: int, check: Callable[[], None]) -> None:
        readers = range(len(self._near))
        while (
            self._position + count - min(map(self._ring.consumed, readers)) > self._ring.num_bytes
        ):
            check()
            time.sleep(_FULL_S)


class Receiver:
    """Owns the reading end of one rank; without a ring, messages come through the link."""

    def __init__(self, link: socket.socket, ring: tuple[Segment, int, int] | None = None) -> None:
        """`ring`: its memory, its number of readers, and which of them this is."""
        self._link = link
        self._ring: _Ring | None = None
        self._reader = 0
        if ring is not None:
            segment, count, self._reader = ring
            self._ring = _Ring(segment, count)
        self._position = 0
        self.end_reason: str | None = None  # why the sender ended, if it said so

    def receive(self) -> bytes | None:
        """The next message; None: rank 0 has ended or closed the link."""
        pieces = []
        while True:
            header = receive_exactly(self._link, _LENGTH.size)
            if header is None:
                return None
            (length,) = _LENGTH.unpack(header)
            piece = self._piece(length & ~(_MORE | _END))
            if piece is None:
                return None
            if length & _END:
                self.end_reason = piece.decode()
                return None
            pieces.append(piece)
            if not length & _MORE:
                return b"".join(pieces)

    def _piece(self, count: int) -> bytes | None:
        if self._ring is None:
            return receive_exactly(self._link, count)
        found = self._ring.read(self._position, count)
        self._position += count
        self._ring.set_consumed(self._reader, self._position)
        return found
