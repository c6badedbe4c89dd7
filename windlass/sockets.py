"""Reads and time limits of blocking sockets."""

from __future__ import annotations

import socket
import struct

SILENT_S = 3  # without an acknowledgement, the other machine is lost


def receive_exactly(link: socket.socket, count: int) -> bytes | None:
    """So many bytes of a link; None: its other end is closed."""
    found = b""
    while len(found) < count:
        try:
            more = link.recv(count - len(found))
        except OSError:  # reset, or no answer within the socket's time limit
            return None
        if not more:
            return None
        found += more
    return found


def keep_alive(link: socket.socket) -> None:
    """Close the link soon after the other machine is gone without a word, and send without delay."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_S)


def limit_reads(link: socket.socket, seconds: float) -> None:
    """Let reads of a blocking socket end without a result after this time; 0: never."""
    whole = int(seconds)
    limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
