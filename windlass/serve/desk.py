"""Accounts for completion requests with tickets, so that each request ends with one outcome.

Counts the requests in flight, and reports when a draining server is idle.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from windlass.errors import DeadlineExceeded, EngineError, Overloaded, RequestError
from windlass.serve.live_config import LiveConfig
from windlass.serve.metrics import Metrics, Outcome
from windlass.serve.problems import Draining, Sleeping

_log = logging.getLogger("windlass.serve")


_REFUSALS = (RequestError, Overloaded, DeadlineExceeded, Draining, Sleeping)


class Ticket:
    """One request from its arrival to its end. Only the first call of `end` has an effect."""

    def __init__(self, desk: Desk, path: str) -> None:
        self._desk = desk
        self.path = path
        self._open = True
        self.began = time.monotonic()

    def end(self, outcome: Outcome) -> None:
        if self._open:
            self._open = False
            self._desk.close_ticket(self.path, outcome, time.monotonic() - self.began)

    def end_with(self, error: EngineError) -> None:
        """End with the outcome of `error`: rejected or error."""
        refused = isinstance(error, _REFUSALS)
        self.end("rejected" if refused else "error")


class Desk:
    """Owns the number of requests in flight, and whether new requests are accepted."""

    def __init__(self, metrics: Metrics, config: LiveConfig) -> None:
        self._metrics = metrics
        self._config = config
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_in_flight = 0
        self.draining = False
        self.check_awake: Callable[[], None] = lambda: None  # set by Sleeper

    def open_ticket(self, path: str) -> Ticket:
        self._metrics.received()
        self.hold()
        return Ticket(self, path)

    def close_ticket(self, path: str, outcome: Outcome, seconds: float) -> None:
        self._metrics.ended(outcome)
        if self._config.value.enable_log_requests:
            _log.info("%s: %s after %.3f s", path, outcome, seconds)
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
