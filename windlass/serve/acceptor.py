"""Accepts connections itself, where uvicorn cannot: before a TLS handshake, or for HTTP workers.

asyncio's TLS server reports a connection only after the handshake, so that clients which never
finish it would use descriptors that no limit counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable

from windlass.serve.connections import Connections
from windlass.serve.tls import Tls
from windlass.serve.transport import LimitedProtocol

_log = logging.getLogger("windlass.serve")

_BACKLOG = 2048
_PAUSE_S = 0.1  # after an accept that failed

Accept = Callable[[], Awaitable[socket.socket]]


def accept_from(listener: socket.socket) -> Accept:
    """Listen, and return the function that waits for the next connection."""
    listener.setblocking(False)
    listener.listen(_BACKLOG)

    async def accept() -> socket.socket:
        accepted, _address = await asyncio.get_running_loop().sock_accept(listener)
        return accepted

    return accept


async def accept_forever(accept: Accept, handle: Callable[[socket.socket], None]) -> None:
    """Hand every connection to `handle`."""
    while True:
        try:
            accepted = await accept()
        except OSError as error:  # the client disconnected, or no descriptor is free
            _log.warning("a connection could not be accepted: %s", error)
            await asyncio.sleep(_PAUSE_S)
            continue
        handle(accepted)


class Acceptor:
    """Makes a protocol for each connection that `accept` returns. uvicorn closes it like a server.

    `tls` None: plain HTTP.
    """

    def __init__(
        self,
        accept: Accept,
        tls: Tls | None,
        *,
        make_protocol: Callable[[], LimitedProtocol],
        connections: Connections,
    ) -> None:
        self._tls = tls
        self._make_protocol = make_protocol
        self._connections = connections
        self._opening: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(accept_forever(accept, self._accepted))
        self._accepting.add_done_callback(_report_failure)

    def _accepted(self, accepted: socket.socket) -> None:
        protocol = self._make_protocol()
        if self._tls is not None and not protocol.admit_before_tls(accepted):
            accepted.close()  # before the handshake no error can be sent
            return
        task = asyncio.create_task(self._open(accepted, protocol))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, accepted: socket.socket, protocol: LimitedProtocol) -> None:
        loop = asyncio.get_running_loop()
        timeout_s = self._connections.limits.header_timeout if self._tls else None
        try:
            await loop.connect_accepted_socket(
                lambda: protocol,
                accepted,
                ssl=None if self._tls is None else self._tls.context,
                ssl_handshake_timeout=timeout_s,
                ssl_shutdown_timeout=timeout_s,
            )
        except OSError:  # a TLS error, a timeout, or a disconnect
            self._connections.release(protocol)

    def close(self) -> None:
        for task in (self._accepting, *self._opening):
            task.cancel()

    async def wait_closed(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await self._accepting


def _report_failure(accepting: asyncio.Task[None]) -> None:
    if not accepting.cancelled():
        _log.error("the server stopped accepting connections", exc_info=accepting.exception())
