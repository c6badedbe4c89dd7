"""Accounts for completion requests with tickets, so that each request ends with one outcome.

Counts the requests in flight, and reports when a draining server is idle. A ticket collects the
summary of its request, which request_log.py logs and otel.py exports.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from starlette.requests import Request
from starlette.types import Message, Send

from windlass.errors import DeadlineExceeded, EngineError, Overloaded, RequestError
from windlass.serve.keys import BATCH_OWNER
from windlass.serve.live_config import LiveConfig
from windlass.serve.metrics import Metrics, Outcome
from windlass.serve.problems import Draining, Sleeping, problem_of
from windlass.serve.served_completion import ServedCompletion
from windlass.serve.summary import MAX_BODY_BYTES, RequestSummary
from windlass.serve.trace_store import Entry

_DISCONNECTED = 499  # nginx's status for a client that did not wait for the response


class RequestReporter(Protocol):
    """Gets the summary of every request that has ended."""

    @property
    def is_wanted(self) -> bool:
        """Whether requests are logged or traced now."""
        ...

    def report(self, summary: RequestSummary, entry: Entry | None) -> None:
        """Report a request. `entry`: its traces, which may still arrive; None: it has none."""


_REFUSALS = (RequestError, Overloaded, DeadlineExceeded, Draining, Sleeping)


class Ticket:
    """One request from its arrival to its end. Only the first call of `end` has an effect."""

    def __init__(self, desk: Desk, summary: RequestSummary) -> None:
        self._desk = desk
        self._open = True
        self.summary = summary
        self.path = summary.path
        self.began = summary.began
        self.entry: Entry | None = None
        self.served: Sequence[ServedCompletion] = ()
        self.on_end: Callable[[], None] = lambda: None
        self.limit_headers: dict[str, str] | None = (
            None  # None: not counted with its tenant's limits
        )

    def mark(self, phase: str) -> None:
        """End a phase before the engine: the time since the phase before it."""
        phases, now = self.summary.phases, time.monotonic()
        self._desk.phase_ended(phase, now - (phases[-1][1] if phases else self.began))
        phases.append((phase, now))

    def end(self, outcome: Outcome, *, status: int = 200, reason: str = "") -> None:
        """End with an outcome. `reason` of a success: the finish reasons of its completions."""
        if not self._open:
            return
        self._open = False
        self.on_end()
        summary = self.summary
        summary.ended = time.monotonic()
        summary.outcome, summary.reason = outcome, reason
        summary.status = summary.status or status
        self._desk.close_ticket(self)

    def end_with(self, error: EngineError) -> None:
        """End with the outcome of `error`: rejected or error."""
        refused = isinstance(error, _REFUSALS)
        problem = problem_of(error)
        self.end(
            "rejected" if refused else "error",
            status=problem.status,
            reason=problem.code or problem.type,
        )

    def end_aborted(self, reason: str = "client_disconnected") -> None:
        """End without a response, or with a part of it."""
        self.end("aborted", status=_DISCONNECTED, reason=reason)

    # ---- bodies, with --log-bodies -------------------------------------------------------------

    def keep_request(self, body: bytes) -> bytes:
        """Keep the beginning of the request's body; returns the body."""
        if self._desk.logs_bodies:
            self.summary.request_body = body[:MAX_BODY_BYTES]
        return body

    def keep_response(self, body: bytes) -> None:
        """Keep a part of the response."""
        if self._desk.logs_bodies:
            self.summary.response_body = (self.summary.response_body + body)[:MAX_BODY_BYTES]

    def keeping(self, send: Send) -> Send:
        """`send`, keeping what it sends."""
        if not self._desk.logs_bodies:
            return send

        async def keep(message: Message) -> None:
            self.keep_response(message.get("body", b""))
            await send(message)

        return keep


class Desk:
    """Owns the number of requests in flight, and whether new requests are accepted."""

    def __init__(self, metrics: Metrics, config: LiveConfig, reporter: RequestReporter) -> None:
        self._metrics = metrics
        self._config = config
        self._reporter = reporter
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_in_flight = 0
        self.draining = False
        self.check_awake: Callable[[], None] = lambda: None  # set by Sleeper
        self.on_end: Callable[[RequestSummary], None] = lambda _: (
            None
        )  # set by the ingress of a fleet

    @property
    def logs_bodies(self) -> bool:
        return self._config.value.log_bodies

    def open_ticket(self, request: Request) -> Ticket:
        self._metrics.received()
        self.hold()
        summary = RequestSummary(path=request.url.path, began=time.monotonic())
        if self._reporter.is_wanted:
            summary.is_batch = BATCH_OWNER in request.scope
            summary.read_headers(request)
        return Ticket(self, summary)

    def phase_ended(self, phase: str, seconds: float) -> None:
        self._metrics.phase_ended(phase, seconds)

    def close_ticket(self, ticket: Ticket) -> None:
        self._metrics.ended(ticket.summary.outcome, ticket.summary.tenant)
        self.on_end(ticket.summary)
        if self._reporter.is_wanted:
            _count_tokens(ticket.summary, ticket.served)
            self._reporter.report(ticket.summary, ticket.entry)
        self.release()

    def hold(self) -> None:
        """Count a request of an HTTP worker, which has the ticket, until `release`."""
        self.num_in_flight += 1
        self._idle.clear()

    def release(self) -> None:
        self.num_in_flight -= 1
        if self.num_in_flight == 0:
            self._idle.set()

    def check_open(self) -> None:
        """Raise if the server is draining or asleep."""
        if self.draining:
            raise Draining("the server is shutting down and accepts no new requests.")
        self.check_awake()

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no request is in flight; False: that took longer than `timeout_s`."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True


def _count_tokens(summary: RequestSummary, served: Sequence[ServedCompletion]) -> None:
    """Add what the completions of a request have sent so far."""
    if not served:
        return
    summary.num_cached = sum(each.num_cached for each in served[:: summary.num_completions])
    summary.num_output = sum(each.num_tokens for each in served)
    summary.num_drafted = sum(each.num_drafted for each in served)
    summary.num_accepted = sum(each.num_accepted for each in served)
    timed = [(each, each.timer.first_at) for each in served if each.timer.first_at is not None]
    if timed:
        summary.ttft_s = min(first for _, first in timed) - summary.began
    paces = [
        (each.timer.last_at - first) / (each.num_tokens - 1)
        for each, first in timed
        if each.timer.last_at > first  # beam search has all tokens at once
    ]
    if paces:
        summary.tpot_s = sum(paces) / len(paces)
    reasons = (each.completion.finish_reason for each in served)
    summary.finish_reasons = [reason for reason in reasons if reason is not None]
    if summary.outcome == "success":
        summary.reason = ",".join(dict.fromkeys(summary.finish_reasons))
