"""The connection between the server's process and one HTTP worker: frames over a socket pair.

A frame is its length in four bytes, then that many bytes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

_LENGTH_BYTES = 4


class Link(asyncio.Protocol):
    """Sends and receives frames. `on_lost` is called when the other process has closed its end."""

    def __init__(self, on_frame: Callable[[bytes], None], on_lost: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None

    async def open(self, end: socket.socket) -> None:
        end.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=end)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None
        self._on_lost()

    def send(self, frame: bytes) -> None:
        """Send without waiting; dropped after the other process has ended."""
        if self._transport is not None:
            self._transport.write(len(frame).to_bytes(_LENGTH_BYTES, "little") + frame)

    @property
    def num_unsent_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        at = 0
        while len(received) - at >= _LENGTH_BYTES:
            length = int.from_bytes(received[at : at + _LENGTH_BYTES], "little")
            end = at + _LENGTH_BYTES + length
            if len(received) < end:
                break
            self._on_frame(bytes(received[at + _LENGTH_BYTES : end]))
            at = end
        del received[:at]

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
