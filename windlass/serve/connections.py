"""The set of open connections: their number, buffered bytes, and stalled clients.

Does not know HTTP: transport.py marks connections waiting or busy, and checks at every sweep whether
its client has stalled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from windlass.config import ServeConfig

CutReason = Literal[
    "bad_request",
    "body_memory",
    "body_timeout",
    "evicted",
    "header_timeout",
    "head_too_large",
    "stream_buffer",
    "too_many",
    "unread_body",
    "url_too_long",
    "write_timeout",
]

_MAX_LINGERING = 16  # their descriptors come from descriptors.RESERVE
_EVICT_AFTER_S = 1.0
_SWEEP_S = 0.5


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits on connections, from the server's config."""

    max_connections: int
    max_url_bytes: int
    max_header_bytes: int
    max_header_fields: int
    max_buffered_body_bytes: int
    header_timeout: float
    body_timeout: float
    write_timeout: float
    keep_alive_timeout: float
    min_transfer_rate: int
    evict_after: float = _EVICT_AFTER_S

    @classmethod
    def of(cls, config: ServeConfig, max_connections: int) -> ConnectionLimits:
        share = config.max_buffered_body_bytes // max(1, config.http_workers)
        return cls(
            max_connections=max_connections,
            max_url_bytes=config.max_url_bytes,
            max_header_bytes=config.max_header_bytes,
            max_header_fields=config.max_header_fields,
            max_buffered_body_bytes=max(share, config.max_body_bytes),
            header_timeout=config.header_timeout,
            body_timeout=config.body_timeout,
            write_timeout=config.write_timeout,
            keep_alive_timeout=config.keep_alive_timeout,
            min_transfer_rate=config.min_transfer_rate,
        )


class RateWindow:
    """Checks once per `span_s` that at least `min_rate` bytes per second were transferred."""

    __slots__ = ("_began", "_min_bytes", "_num_bytes", "_span_s")

    def __init__(self, span_s: float, min_rate: int, *, now: float, num_bytes: int) -> None:
        self._span_s = span_s
        self._min_bytes = max(1, int(span_s * min_rate))
        self.restart(now, num_bytes)

    def restart(self, now: float, num_bytes: int) -> None:
        self._began = now
        self._num_bytes = num_bytes

    def is_stalled(self, now: float, num_bytes: int) -> bool:
        """Whether a window has passed with too few bytes. `num_bytes` is the total so far."""
        if now - self._began < self._span_s:
            return False
        stalled = num_bytes - self._num_bytes < self._min_bytes
        self.restart(now, num_bytes)
        return stalled


class Connection(Protocol):
    """The interface of a connection to the table."""

    def abort(self) -> None:
        """Close the connection without waiting for its client."""

    def check(self, now: float) -> None:
        """End the connection if its client has stalled."""

    def cut(self, reason: CutReason) -> None:
        """Abort and release the connection, and count the reason."""


class Connections:
    """Owns the set of open connections and the number of body bytes that they buffer.

    At the limit, a new connection evicts the one that has waited longest without a complete
    request: neither half-open nor idle connections can lock out other clients, nor can bodies
    that hardly advance.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        on_cut: Callable[[CutReason], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.clock = clock
        self.count_cut = on_cut
        self.num_body_bytes = 0
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, float] = {}  # for a whole request, since; oldest first
        self._refused: set[Connection] = set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def admit(self, connection: Connection) -> bool:
        """Add a new connection; False: the limit is reached and none can be evicted."""
        if len(self._open) >= self.limits.max_connections and not self._evict():
            self.count_cut("too_many")
            return False
        self._open.add(connection)
        self.mark_waiting(connection)
        return True

    def _evict(self) -> bool:
        oldest = next(iter(self._waiting), None)
        if oldest is None or self.clock() - self._waiting[oldest] < self.limits.evict_after:
            return False
        oldest.cut("evicted")
        return True

    def mark_waiting(self, connection: Connection) -> None:
        """Mark that from now on the connection waits for a request, or for the rest of one."""
        if connection in self._open:
            self._waiting.pop(connection, None)
            self._waiting[connection] = self.clock()

    def mark_busy(self, connection: Connection) -> None:
        """Mark that the connection has a request: it is not evicted until the response is sent."""
        self._waiting.pop(connection, None)

    def may_linger(self, connection: Connection) -> bool:
        """Whether a connection above the limit may wait for its client to read the error."""
        if len(self._refused) >= _MAX_LINGERING:
            return False
        self._refused.add(connection)
        return True

    def release(self, connection: Connection) -> None:
        """Remove a closed connection; may be called twice."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)
        self._refused.discard(connection)

    def hold_body(self, num_bytes: int) -> bool:
        """Add to or subtract from the buffered body bytes; False: the limit is exceeded."""
        self.num_body_bytes += num_bytes
        return self.num_body_bytes <= self.limits.max_buffered_body_bytes

    def abort_all(self) -> None:
        """Abort all connections: a client that ignores a TLS shutdown would delay the exit."""
        for connection in [*self._open, *self._refused]:
            connection.abort()

    async def sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.sweep()

    def sweep(self) -> None:
        """Let every connection check whether its client has stalled."""
        now = self.clock()
        for connection in [*self._open, *self._refused]:
            connection.check(now)
