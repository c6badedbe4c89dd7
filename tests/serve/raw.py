"""HTTP clients without manners: they write bytes to a socket and see what comes back."""

from __future__ import annotations

import json
import socket
import ssl
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

HANG_GUARD_S = 60.0


class RawClient:
    """One connection to a server. Every wait ends with an error after HANG_GUARD_S."""

    def __init__(
        self, url: str, receive_buffer: int | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._socket = socket.socket()
        self._socket.settimeout(HANG_GUARD_S)
        if receive_buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._socket.connect((parts.hostname, parts.port))
        if tls is not None:
            self._socket = tls.wrap_socket(self._socket, server_hostname="localhost")

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def send(self, data: bytes) -> bool:
        """Whether the server still took it."""
        try:
            self._socket.sendall(data)
        except ConnectionError:
            return False
        return True

    def flood(self, piece: bytes, max_bytes: int) -> int:
        """Send `piece` again and again until the server hangs up; returns the bytes it took."""
        sent = 0
        while sent < max_bytes and self.send(piece):
            sent += len(piece)
        return sent

    def read_some(self) -> bytes:
        """The next bytes; nothing when the server hung up."""
        try:
            return self._socket.recv(65536)
        except ConnectionError:
            return b""

    def read_until(self, mark: bytes) -> bytes:
        got = b""
        while mark not in got:
            piece = self.read_some()
            assert piece, f"the server hung up after {got!r}"
            got += piece
        return got

    def read_all(self) -> bytes:
        """Everything until the server hangs up."""
        pieces = []
        while piece := self.read_some():
            pieces.append(piece)
        return b"".join(pieces)


def post(path: str, body: dict[str, Any], *headers: str) -> bytes:
    """A well-formed request."""
    raw = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(raw)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + raw


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


def status_of(answer: bytes) -> int:
    assert answer, "the server hung up without an answer"
    return int(answer.split(b" ", 2)[1])


def error_of(answer: bytes) -> dict[str, Any]:
    """The error in the body of an answer."""
    error: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    return error
