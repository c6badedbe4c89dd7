"""TLS: the certificate, and a listener that counts connections before their handshake.

asyncio's TLS server reports a connection only after the handshake, so that clients which never
finish it would use descriptors that no limit counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable

from windlass.config import ServeConfig
from windlass.errors import ConfigError
from windlass.serve.connections import Connections
from windlass.serve.transport import LimitedProtocol

_log = logging.getLogger("windlass.serve")

_BACKLOG = 2048
_PAUSE_S = 0.1  # after an accept that failed


def tls_context(config: ServeConfig) -> ssl.SSLContext | None:
    """Create the TLS context; None: the server uses plain HTTP."""
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        raise ConfigError(
            f"--ssl-certfile {config.ssl_certfile}, --ssl-keyfile {config.ssl_keyfile} or "
            f"--ssl-ca-certs {config.ssl_ca_certs} cannot be used: {error}. All are PEM files."
        ) from error
    return context


class TlsListener:
    """Accepts connections and starts TLS. uvicorn closes it like an asyncio server."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        *,
        make_protocol: Callable[[], LimitedProtocol],
        connections: Connections,
    ) -> None:
        self._listener = listener
        self._context = context
        self._make_protocol = make_protocol
        self._connections = connections
        self._handshakes: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._accepting = asyncio.create_task(self._accept_forever())
        self._accepting.add_done_callback(_report_failure)

    async def _accept_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _address = await loop.sock_accept(self._listener)
            except OSError as error:  # the client disconnected, or no descriptor is free
                _log.warning("a connection could not be accepted: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            protocol = self._make_protocol()
            if not protocol.admit_before_tls(accepted):
                accepted.close()  # before the handshake no error can be sent
                continue
            task = asyncio.create_task(self._handshake(accepted, protocol))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _handshake(self, accepted: socket.socket, protocol: LimitedProtocol) -> None:
        timeout_s = self._connections.limits.header_timeout
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=timeout_s,
                ssl_shutdown_timeout=timeout_s,
            )
        except OSError:  # a TLS error, a timeout, or a disconnect
            self._connections.release(protocol)

    def close(self) -> None:
        for task in (self._accepting, *self._handshakes):
            task.cancel()

    async def wait_closed(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await self._accepting


def _report_failure(accepting: asyncio.Task[None]) -> None:
    if not accepting.cancelled():
        _log.error("the server stopped accepting connections", exc_info=accepting.exception())
