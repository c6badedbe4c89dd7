"""HTTP/1.1 connections that a rude client can neither fill nor hold: uvicorn's protocol with limits.

Bytes are counted as they arrive, before the parser keeps them. A client that breaks a limit gets an
error in the API's shape where one can still be sent, and the connection is closed. What requests
mean is the application's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from windlass.serve.connections import Connections, CutReason, RateWindow
from windlass.serve.problems import Problem, problem_of_status

CONNECTION = "windlass.connection"  # in a scope: the protocol that the request came through

# Bytes given to the parser at once: limits may be overstepped by so much.
_HEAD_PIECE = 8 * 2**10
_BODY_PIECE = 64 * 2**10
_MAX_PIPELINED = 16
# Chunk sizes, extensions and line ends may take this share of a body, beside a fixed allowance.
_FRAMING_SHARE = 4
_LINGER_S = 2.0
_MAX_LINGER_BYTES = 2**20
_UNREAD_S = 5.0
_MAX_UNREAD_BYTES = 64 * 2**20


class _LimitExceeded(Exception):
    """Ends a parser's callback; what is answered was noted before."""


class LimitedProtocol(HttpToolsProtocol):
    """One connection.

    reading a head -> reading a body -> waiting for the response -> idle, or the next head
          |                 |                    |
         408               408           a reader that lags is cut

    After an error answer it lingers: it discards what still comes, so that the client can read the
    answer before the connection is reset.
    """

    def __init__(self, *, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._connections = connections
        self._limits = connections.limits
        self._socket: socket.socket | None = None  # below TLS
        self._deadline = 0.0  # of the head, of idling, lingering, or discarding an unread body
        self._lingering = False
        self._discarding = False  # what comes has no meaning any more
        self._num_discarded = 0
        self._verdict: tuple[Problem, CutReason] | None = None
        self._running: RequestResponseCycle | None = None  # its response is not complete
        # The request that is arriving.
        self._in_body = False
        self._num_head_bytes = 0
        self._num_fields = 0
        self._num_field_bytes = 0
        self._num_body_bytes = 0
        self._num_framed_bytes = 0  # of its body, chunk sizes, extensions and trailers included
        self._num_bytes_at_answer = 0  # of these, when the answer was complete
        self._num_held_bytes = 0  # of its body, in memory
        self._body_window: RateWindow | None = None
        self._write_window: RateWindow | None = None

    # ---- opening and closing -----------------------------------------------------------------

    def admit_before_tls(self, accepted: socket.socket) -> bool:
        """Count the connection before its handshake; False: there are too many."""
        self._socket = accepted
        return self._connections.admit(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self._socket is None and not self._connections.admit(self):
            self._refuse(transport)
            return
        super().connection_made(transport)
        self._deadline = self._connections.clock() + self._limits.header_timeout

    def _refuse(self, transport: asyncio.Transport) -> None:
        """Answer a connection above the cap, and close it."""
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
            # uvicorn tells only the last request; one before it may still be answered.
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    @property
    def is_closing(self) -> bool:
        """Whether nothing that is written reaches the client any more."""
        return self.transport.is_closing()

    def cut(self, reason: CutReason) -> None:
        """Close the connection at once; a running request ends as if the client had hung up."""
        self._connections.count_cut(reason)
        self._connections.release(self)
        self.abort()

    def cut_if_unread(self) -> None:
        """Cut a client for which more of a stream waits than it may.

        A stream may also wait because the engine is faster than this process for a moment.
        """
        if self.flow.write_paused and not self.transport.is_closing():
            self.cut("stream_buffer")

    def abort(self) -> None:
        """Close the connection without waiting for its client."""
        if self.transport is not None:
            self.transport.abort()
        elif self._socket is not None:
            with contextlib.suppress(OSError):  # it is closed already
                self._socket.shutdown(socket.SHUT_RDWR)  # ends its handshake

    # ---- bytes that arrive -------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        while rest and not (self._discarding or self.transport.is_closing()):
            size = _BODY_PIECE if self._in_body else _HEAD_PIECE
            self._parse(rest[:size])
            rest = rest[size:]
        self._num_discarded += len(rest)
        if self._num_discarded > _MAX_LINGER_BYTES:
            self.abort()

    def _parse(self, piece: memoryview) -> None:
        if self._in_body:
            self._num_framed_bytes += len(piece)
        else:
            if not self._num_head_bytes and self._running is None and self.cycle is not None:
                # The first bytes after idling. A new connection's time runs since it was opened.
                self._deadline = self._connections.clock() + self._limits.header_timeout
            self._num_head_bytes += len(piece)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            self._decline_upgrade()
        except httptools.HttpParserError:
            self._end(*(self._verdict or _malformed()))
        else:
            self._check_sizes()

    def _decline_upgrade(self) -> None:
        """Answer as if no upgrade was asked for, and close: the parser reads nothing behind it."""
        if any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers):
            message = "a request with a body cannot ask for an upgrade. Use plain HTTP/1.1."
            self._end(_problem(400, message, "upgrade_with_body"), "bad_request")
            return
        self.cycle.keep_alive = False
        self._discarding = True

    def _check_sizes(self) -> None:
        """Bound what no callback shows: lines that have not ended, and the framing of chunks."""
        limits = self._limits
        if not self._in_body:
            if self._num_head_bytes > limits.max_url_bytes + limits.max_header_bytes:
                self._end(*self._head_too_large())
            return
        if self._running is None:
            if self._num_framed_bytes - self._num_bytes_at_answer > _MAX_UNREAD_BYTES:
                self.cut("unread_body")
            return
        allowed = limits.max_header_bytes + self._num_body_bytes // _FRAMING_SHARE
        if self._num_framed_bytes - self._num_body_bytes > allowed:
            message = "the body's chunks are too small, or their extensions or trailers too long."
            self._end(_problem(400, message, "bad_framing"), "bad_request")

    # ---- callbacks of the parser -------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[literal-required]
        self._num_fields = self._num_field_bytes = 0

    def on_url(self, url: bytes) -> None:
        limit = self._limits.max_url_bytes
        if len(self.url) + len(url) > limit:
            message = f"the URL is longer than {limit} bytes (--max-url-bytes)."
            self._verdict = _problem(414, message, "url_too_long"), "url_too_long"
            raise _LimitExceeded
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        limits = self._limits
        self._num_fields += 1
        self._num_field_bytes += len(name) + len(value) + 4  # ": " and the end of the line
        if (
            self._num_fields > limits.max_header_fields
            or self._num_field_bytes > limits.max_header_bytes
        ):
            self._verdict = self._head_too_large()
            raise _LimitExceeded
        if not self._in_body:  # a trailer was not there when the headers were checked
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= _MAX_PIPELINED:
            message = f"more than {_MAX_PIPELINED} requests were sent ahead of their answers."
            self._verdict = _problem(400, message, "too_many_pipelined"), "bad_request"
            raise _LimitExceeded
        super().on_headers_complete()
        if not self.pipeline:
            self._running = self.cycle
        self._in_body = True
        self._num_head_bytes = self._num_body_bytes = self._num_framed_bytes = 0
        self._body_window = None
        self._connections.mark_busy(self)

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        if not self.cycle.response_complete:
            self._num_held_bytes += len(body)
            if not self._connections.hold_body(len(body)):
                limit = self._limits.max_buffered_body_bytes
                message = (
                    f"the request bodies that are being received exceed {limit} bytes "
                    "(--max-buffered-body-bytes). Try again."
                )
                self._verdict = _problem(503, message, "body_memory"), "body_memory"
                raise _LimitExceeded
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._release_body()
        self._in_body = False
        if self._running is None:
            self._wait_for_request()

    def on_response_complete(self) -> None:
        self._running = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if self._running is not None:
            return
        if self._in_body:
            self._release_body()
            self._num_bytes_at_answer = self._num_framed_bytes
            self._deadline = self._connections.clock() + _UNREAD_S
        else:
            self._wait_for_request()

    def _wait_for_request(self) -> None:
        limits = self._limits
        begun = self._num_head_bytes > 0
        timeout_s = limits.header_timeout if begun else limits.keep_alive_timeout
        self._deadline = self._connections.clock() + timeout_s
        self._connections.mark_idle(self)

    def _release_body(self) -> None:
        self._connections.hold_body(-self._num_held_bytes)
        self._num_held_bytes = 0

    # ---- time --------------------------------------------------------------------------------

    def check(self, now: float) -> None:
        if self.transport is None:
            return  # the handshake has its own time limit
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
            self._time_is_up()

    def _check_reader(self, now: float) -> None:
        """Cut a client that does not take what is sent. Nothing is added while this is checked."""
        num_sent = -self.transport.get_write_buffer_size()
        if self._write_window is None:
            self._write_window = self._window(self._limits.write_timeout, now, num_sent)
        elif self._write_window.is_stalled(now, num_sent):
            self.cut("write_timeout")

    def _check_body(self, now: float) -> None:
        if self._body_window is None:
            self._body_window = self._window(self._limits.body_timeout, now, 0)
        if self.flow.read_paused or self._running is not self.cycle:
            self._body_window.restart(now, self._num_body_bytes)  # it waits for the server
        elif self._body_window.is_stalled(now, self._num_body_bytes):
            limits = self._limits
            message = (
                f"the body did not advance by {limits.min_transfer_rate} bytes per second for "
                f"{limits.body_timeout:g} s (--body-timeout, --min-transfer-rate)."
            )
            self._end(_problem(408, message, "request_timeout"), "body_timeout")

    def _window(self, span_s: float, now: float, moved: int) -> RateWindow:
        return RateWindow(span_s, self._limits.min_transfer_rate, now, moved)

    def _time_is_up(self) -> None:
        if self._in_body:
            self.cut("unread_body")
        elif self._num_head_bytes:
            message = (
                f"the headers did not come within {self._limits.header_timeout:g} s "
                "(--header-timeout)."
            )
            self._end(_problem(408, message, "request_timeout"), "header_timeout")
        else:
            if self.cycle is None:
                self._connections.count_cut("header_timeout")
            self.transport.close()

    # ---- errors that HTTP itself finds -------------------------------------------------------

    def _end(self, problem: Problem, reason: CutReason) -> None:
        """Answer with `problem` unless another answer has begun, and close the connection."""
        self.pipeline.clear()
        running = self._running
        if running is not None and running.response_started:
            self.cut(reason)
            return
        self._connections.count_cut(reason)
        if running is not None:
            running.disconnected = True  # whatever the application sends now is dropped
            running.message_event.set()
        self.transport.write(_as_http(problem))
        self._linger()

    def _linger(self) -> None:
        """Discard what comes for a while, then close."""
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
    """A whole response, after which the connection is closed."""
    response = problem.response()
    lines = [f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}".encode()]
    lines += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join([*lines, b"connection: close", b"", bytes(response.body)])
