"""Frames between the engine and the grammar sandbox: four bytes of length, then the payload."""

from __future__ import annotations

import socket
import struct

_LENGTH = struct.Struct(">I")


def send_frame(sock: socket.socket, payload: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(payload)) + payload)


def recv_frame(sock: socket.socket) -> bytes | None:
    """Receive the next frame. None: the peer closed the socket."""
    head = _recv_exactly(sock, _LENGTH.size)
    return None if head is None else _recv_exactly(sock, _LENGTH.unpack(head)[0])


def _recv_exactly(sock: socket.socket, count: int) -> bytes | None:
    parts, left = [], count
    while left:
        part = sock.recv(min(left, 1 << 20))
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
