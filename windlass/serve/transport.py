"""uvicorn's HTTP/1.1 protocol with limits on sizes and times, against hostile or slow clients.

Bytes are counted as they arrive, before the parser stores them. A client that exceeds a limit gets
an error in the API's format if the response has not begun, and the connection is closed. This
module does not interpret requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from windlass.serve.connections import ConnectionLimits, Connections, CutReason, RateWindow
from windlass.serve.problems import Problem, problem_of_status

CONNECTION = "windlass.connection"  # scope key: the protocol object of the request

# Bytes per call of the parser: limits can be exceeded by at most this much.
_HEAD_SLICE = 8 * 2**10
_BODY_SLICE = 64 * 2**10
_MAX_PIPELINED = 16
# Chunk sizes, extensions and line ends may add 1/4 of the body, plus a fixed allowance.
_FRAMING_DIVISOR = 4
_LINGER_S = 2.0
_MAX_LINGER_BYTES = 2**20
_UNREAD_S = 5.0
_MAX_UNREAD_BYTES = 64 * 2**20


class _LimitExceeded(Exception):
    """Leaves a parser callback; `_limit_error` has the response."""


class LimitedProtocol(HttpToolsProtocol):
    """One connection.

    reading a head -> reading a body -> waiting for the response -> idle, or the next head
          |                 |                    |
         408               408           a slow reader is disconnected

    After an error response it lingers: it discards further input, so that the client can read the
    response before the connection is reset.
    """

    def __init__(self, *, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._connections = connections
        self._socket: socket.socket | None = None  # below TLS
        self._deadline = 0.0  # for headers, keep-alive, lingering, or discarding an unread body
        self._lingering = False
        self._discarding = False  # further input is ignored
        self._num_discarded = 0
        self._limit_error: tuple[Problem, CutReason] | None = None
        self._running: RequestResponseCycle | None = None  # its response is incomplete
        self.cut_reason: CutReason | None = None  # why the server closed the connection
        # State of the request that is being received.
        self._in_body = False
        self._num_head_bytes = 0
        self._num_fields = 0
        self._num_field_bytes = 0
        self._num_body_bytes = 0
        self._num_marked_bytes = 0  # of the body, when the connection was marked waiting
        self._num_framed_bytes = 0  # body, chunk sizes, extensions and trailers
        self._framed_bytes_at_response = 0  # _num_framed_bytes when the response was complete
        self._num_held_bytes = 0  # body bytes in memory
        self._body_window: RateWindow | None = None
        self._write_window: RateWindow | None = None

    @property
    def _limits(self) -> ConnectionLimits:
        return self._connections.limits

    # ---- open and close ----------------------------------------------------------------------

    def admit_before_tls(self, accepted: socket.socket) -> bool:
        """Count the connection before its TLS handshake; False: the limit is reached."""
        self._socket = accepted
        return self._connections.admit(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self._socket is None and not self._connections.admit(self):
            self._refuse(transport)
            return
        super().connection_made(transport)
        self._deadline = self._connections.clock() + self._limits.header_timeout

    def _refuse(self, transport: asyncio.Transport) -> None:
        """Send 503 to a connection above the limit, and close it."""
        self.transport = transport
        limit = self._limits.max_connections
        problem = _problem(
            503,
            f"the server has {limit} open connections, its limit (--max-connections). Try again.",
            "too_many_connections",
        )
        transport.write(_as_http(problem))
        if self._connections.may_linger(self):
            self._linger()
        else:
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.release(self)
        self._release_body()
        running = self._running
        if running is not None and not running.response_complete:
            # uvicorn notifies only the last request; an earlier one may still be running.
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    @property
    def is_closing(self) -> bool:
        """Whether writes no longer reach the client."""
        return self.transport.is_closing()

    def cut(self, reason: CutReason) -> None:
        """Close the connection at once; a running request sees a disconnect."""
        self.cut_reason = reason
        self._connections.count_cut(reason)
        self._connections.release(self)
        self.abort()

    def cut_if_unread(self) -> None:
        """Disconnect a client whose stream buffer is full, if the client is the cause.

        The buffer can also be full because the engine is briefly faster than this process.
        """
        if self.flow.write_paused and not self.transport.is_closing():
            self.cut("stream_buffer")

    def abort(self) -> None:
        """Close the connection without waiting for its client."""
        if self.transport is not None:
            self.transport.abort()
        elif self._socket is not None:
            with contextlib.suppress(OSError):  # already closed
                self._socket.shutdown(socket.SHUT_RDWR)  # ends the handshake

    # ---- input -------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        while rest and not (self._discarding or self.transport.is_closing()):
            size = _BODY_SLICE if self._in_body else _HEAD_SLICE
            self._parse(rest[:size])
            rest = rest[size:]
        self._num_discarded += len(rest)
        if self._num_discarded > _MAX_LINGER_BYTES:
            self.abort()

    def _parse(self, data: memoryview) -> None:
        if self._in_body:
            self._num_framed_bytes += len(data)
        else:
            if not self._num_head_bytes and self._running is None and self.cycle is not None:
                # First bytes after keep-alive. A new connection's deadline runs since it was opened.
                self._deadline = self._connections.clock() + self._limits.header_timeout
            self._num_head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._decline_upgrade()
        except httptools.HttpParserError:
            self._end(*(self._limit_error or _malformed()))
        else:
            self._check_sizes()

    def _decline_upgrade(self) -> None:
        """Ignore the upgrade, respond and close: the parser stops after an upgrade request."""
        if any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers):
            message = "a request with a body cannot request an upgrade. Use plain HTTP/1.1."
            self._end(_problem(400, message, "upgrade_with_body"), "bad_request")
            return
        self.cycle.keep_alive = False
        self._discarding = True

    def _check_sizes(self) -> None:
        """Check sizes that no parser callback reports: incomplete lines and chunk framing."""
        limits = self._limits
        if not self._in_body:
            if self._num_head_bytes > limits.max_url_bytes + limits.max_header_bytes:
                self._end(*self._head_too_large())
            return
        if self._running is None:
            if self._num_framed_bytes - self._framed_bytes_at_response > _MAX_UNREAD_BYTES:
                self.cut("unread_body")
            return
        allowed = limits.max_header_bytes + self._num_body_bytes // _FRAMING_DIVISOR
        if self._num_framed_bytes - self._num_body_bytes > allowed:
            message = "the body's chunks are too small, or their extensions or trailers too long."
            self._end(_problem(400, message, "bad_framing"), "bad_request")

    # ---- parser callbacks --------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[literal-required]
        self._num_fields = self._num_field_bytes = 0

    def on_url(self, url: bytes) -> None:
        limit = self._limits.max_url_bytes
        if len(self.url) + len(url) > limit:
            message = f"the URL is longer than {limit} bytes (--max-url-bytes)."
            self._limit_error = _problem(414, message, "url_too_long"), "url_too_long"
            raise _LimitExceeded
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        limits = self._limits
        self._num_fields += 1
        self._num_field_bytes += len(name) + len(value) + 4  # ": " and CRLF
        if (
            self._num_fields > limits.max_header_fields
            or self._num_field_bytes > limits.max_header_bytes
        ):
            self._limit_error = self._head_too_large()
            raise _LimitExceeded
        if not self._in_body:  # trailers are dropped: they were not checked as headers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= _MAX_PIPELINED:
            message = f"more than {_MAX_PIPELINED} requests were pipelined."
            self._limit_error = _problem(400, message, "too_many_pipelined"), "bad_request"
            raise _LimitExceeded
        super().on_headers_complete()
        if not self.pipeline:
            self._running = self.cycle
        self._in_body = True
        self._num_head_bytes = self._num_body_bytes = self._num_framed_bytes = 0
        self._body_window = None
        if self._running is self.cycle:
            self._wait_for_body()

    def _wait_for_body(self) -> None:
        """Let other clients have the connection's place unless its body arrives soon."""
        self._num_marked_bytes = self._num_body_bytes
        self._connections.mark_waiting(self)

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        if (
            self._running is self.cycle
            and self._num_body_bytes - self._num_marked_bytes >= _BODY_SLICE
        ):
            self._wait_for_body()  # anew: a body that arrives fast does not lose its place
        if not self.cycle.response_complete:
            self._num_held_bytes += len(body)
            if not self._connections.hold_body(len(body)):
                limit = self._limits.max_buffered_body_bytes
                message = (
                    f"the request bodies in reception exceed {limit} bytes "
                    "(--max-buffered-body-bytes). Try again."
                )
                self._limit_error = _problem(503, message, "body_memory"), "body_memory"
                raise _LimitExceeded
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._release_body()
        self._in_body = False
        if self._running is None:
            self._wait_for_request()
        else:
            self._connections.mark_busy(self)

    def on_response_complete(self) -> None:
        self._running = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if self._running is not None:
            if self._in_body and self._running is self.cycle:
                self._wait_for_body()
            return
        if self._in_body:
            self._release_body()
            self._framed_bytes_at_response = self._num_framed_bytes
            self._deadline = self._connections.clock() + _UNREAD_S
        else:
            self._wait_for_request()

    def _wait_for_request(self) -> None:
        limits = self._limits
        has_begun = self._num_head_bytes > 0
        timeout_s = limits.header_timeout if has_begun else limits.keep_alive_timeout
        self._deadline = self._connections.clock() + timeout_s
        self._connections.mark_waiting(self)

    def release_body(self, num_bytes: int) -> None:
        """Stop counting body bytes that the application has taken and does not keep."""
        num_bytes = min(num_bytes, self._num_held_bytes)
        self._connections.hold_body(-num_bytes)
        self._num_held_bytes -= num_bytes

    def _release_body(self) -> None:
        self.release_body(self._num_held_bytes)

    # ---- timeouts ----------------------------------------------------------------------------

    def check(self, now: float) -> None:
        if self.transport is None:
            return  # the handshake has its own timeout
        if self._lingering:
            if now >= self._deadline:
                self.abort()
            return
        if self.transport.is_closing() or self.flow.write_paused:
            self._check_reader(now)
            return
        self._write_window = None
        if self._in_body and self._running is not None:
            self._check_body(now)
        elif self._running is None and now >= self._deadline:
            self._on_deadline()

    def _check_reader(self, now: float) -> None:
        """Disconnect a client that does not read. Writing is paused, so the buffer only shrinks."""
        num_sent = -self.transport.get_write_buffer_size()
        if self._write_window is None:
            self._write_window = self._window(self._limits.write_timeout, now, num_sent)
        elif self._write_window.is_stalled(now, num_sent):
            self.cut("write_timeout")

    def _check_body(self, now: float) -> None:
        if self._body_window is None:
            self._body_window = self._window(self._limits.body_timeout, now, 0)
        if (
            self.flow.read_paused or self._running is not self.cycle
        ):  # the client waits for the server
            self._body_window.restart(now, self._num_body_bytes)
            if self._running is self.cycle:
                self._wait_for_body()
        elif self._body_window.is_stalled(now, self._num_body_bytes):
            limits = self._limits
            message = (
                f"the body did not advance by {limits.min_transfer_rate} bytes per second for "
                f"{limits.body_timeout:g} s (--body-timeout, --min-transfer-rate)."
            )
            self._end(_problem(408, message, "request_timeout"), "body_timeout")

    def _window(self, span_s: float, now: float, num_bytes: int) -> RateWindow:
        rate = self._limits.min_transfer_rate
        return RateWindow(span_s, rate, now=now, num_bytes=num_bytes)

    def _on_deadline(self) -> None:
        if self._in_body:
            self.cut("unread_body")
        elif self._num_head_bytes:
            message = (
                f"the headers did not arrive within {self._limits.header_timeout:g} s "
                "(--header-timeout)."
            )
            self._end(_problem(408, message, "request_timeout"), "header_timeout")
        else:
            if self.cycle is None:
                self._connections.count_cut("header_timeout")
            self.transport.close()

    # ---- protocol errors ---------------------------------------------------------------------

    def _end(self, problem: Problem, reason: CutReason) -> None:
        """Respond with `problem` unless a response has begun, and close the connection."""
        self.pipeline.clear()
        running = self._running
        if running is not None and running.response_started:
            self.cut(reason)
            return
        self._connections.count_cut(reason)
        if running is not None:
            running.disconnected = True  # drops further output of the application
            running.message_event.set()
        self.transport.write(_as_http(problem))
        self._linger()

    def _linger(self) -> None:
        """Discard input for a while, then close."""
        self._lingering = self._discarding = True
        self._deadline = self._connections.clock() + _LINGER_S
        if self.flow is not None:
            self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _head_too_large(self) -> tuple[Problem, CutReason]:
        limits = self._limits
        message = (
            f"the headers are longer than {limits.max_header_bytes} bytes (--max-header-bytes) or "
            f"more than {limits.max_header_fields} (--max-header-fields)."
        )
        return _problem(431, message, "headers_too_large"), "head_too_large"


def _malformed() -> tuple[Problem, CutReason]:
    return _problem(400, "this is not HTTP/1.1.", "bad_http"), "bad_request"


def _problem(status: int, message: str, code: str) -> Problem:
    headers = {"Retry-After": "1"} if status == 503 else {}
    return problem_of_status(status, message, code, **headers)


def _as_http(problem: Problem) -> bytes:
    """Encode a complete response that closes the connection."""
    problem.log("")
    response = problem.response("")
    lines = [f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}".encode()]
    lines += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join([*lines, b"connection: close", b"", bytes(response.body)])
