"""A raw HTTP client: writes bytes to a socket and reads the response."""

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
        """Send bytes; False: the server has closed the connection."""
        try:
            self._socket.sendall(data)
        except ConnectionError:
            return False
        return True

    def flood(self, data: bytes, max_bytes: int) -> int:
        """Send `data` repeatedly until the server disconnects; returns the bytes sent."""
        sent = 0
        while sent < max_bytes and self.send(data):
            sent += len(data)
        return sent

    def read_some(self) -> bytes:
        """The next bytes; empty if the server has disconnected."""
        try:
            return self._socket.recv(65536)
        except ConnectionError:
            return b""

    def read_until(self, mark: bytes) -> bytes:
        got = b""
        while mark not in got:
            data = self.read_some()
            assert data, f"the server disconnected after {got!r}"
            got += data
        return got

    def read_all(self) -> bytes:
        """All bytes until the server disconnects."""
        got = []
        while data := self.read_some():
            got.append(data)
        return b"".join(got)


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


def status_of(response: bytes) -> int:
    assert response, "the server disconnected without a response"
    return int(response.split(b" ", 2)[1])


def error_of(response: bytes) -> dict[str, Any]:
    """The error in the body of a response."""
    error: dict[str, Any] = json.loads(response.partition(b"\r\n\r\n")[2])["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    return error
