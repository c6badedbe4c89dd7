"""Who may join the queue: a bound on waiting requests and tokens, and when to come back.

Knows the backlog and how fast it shrinks, not who asks or what for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from windlass.config import ServeConfig
from windlass.core.types import EngineStats
from windlass.errors import Overloaded, RequestError
from windlass.serve.client import Backlog, EngineClient

_WINDOW_S = 30.0
_MIN_WAIT_S = 1.0
_MAX_WAIT_S = 60.0

MAX_REQS = "max_num_queued_reqs"
MAX_TOKENS = "max_num_queued_tokens"


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    num_tokens: int
    num_finished: int


class Rates:
    """How many tokens and requests the engine finishes per second, over the last half minute."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()

    def observe(self, at: float, stats: EngineStats, last: EngineStats, num_finished: int) -> None:
        num_tokens = stats.num_prompt_tokens_computed + stats.num_generated_tokens
        # A new engine counts from zero, and idle time says nothing about speed.
        if last.num_steps == 0 or stats.num_running + stats.num_waiting == 0:
            self._samples.clear()
        self._samples.append(_Sample(at, num_tokens, num_finished))
        while at - self._samples[0].at > _WINDOW_S:
            self._samples.popleft()

    def seconds_for(self, num_tokens: int, num_requests: int) -> float:
        """How long until so much has been worked off; the least wait when nothing is known."""
        first, last = (self._samples[0], self._samples[-1]) if self._samples else (None, None)
        if first is None or last is None or last.at - first.at < _MIN_WAIT_S:
            return _MIN_WAIT_S
        seconds = last.at - first.at
        waits = (
            (num_tokens, last.num_tokens - first.num_tokens),
            (num_requests, last.num_finished - first.num_finished),
        )
        # What has not moved in the window will take long; how long, nobody can say.
        estimates = [need * seconds / done if done else _MAX_WAIT_S for need, done in waits if need]
        return min(max(estimates, default=_MIN_WAIT_S), _MAX_WAIT_S)


class AdmissionControl:
    """Refuses requests when too much waits. `on_reject` is told the reason, for the metrics."""

    def __init__(
        self,
        config: ServeConfig,
        client: EngineClient,
        on_reject: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_reqs = config.max_num_queued_reqs
        self._max_tokens = config.max_num_queued_tokens
        self._client = client
        self._on_reject = on_reject
        self._clock = clock
        self._rates = Rates()

    def observe(self, stats: EngineStats, last: EngineStats) -> None:
        self._rates.observe(self._clock(), stats, last, self._client.num_finished)

    def check_possible(self, num_requests: int) -> None:
        """Raise RequestError when `num_requests` at once are too many even for an idle server.

        For a body before it is expanded: 2,000 prompts with n=128 make 256,000 requests.
        """
        slots = self._client.report.max_num_seqs
        if num_requests > slots + self._max_reqs:
            raise RequestError(
                f"the request asks for {num_requests:,} completions at once; this server runs {slots} "
                f"and lets {self._max_reqs} wait. Send fewer prompts, or a smaller n.",
                "n",
            )

    def check(self, num_requests: int, num_tokens: int) -> None:
        """Raise Overloaded when `num_requests` more, with `num_tokens` in all, are too many now."""
        backlog = self._client.backlog
        slots = self._client.report.max_num_seqs
        excess = _queue_after(backlog, slots, num_requests) - self._max_reqs
        if excess > 0:
            self._refuse(MAX_REQS, f"{self._max_reqs} requests", 0, excess)
        # Alone, even a prompt above the limit is served: it waits for nobody.
        if self._max_tokens is not None and backlog.num_tokens:
            over = backlog.num_tokens + num_tokens - self._max_tokens
            if over > 0:
                self._refuse(MAX_TOKENS, f"{self._max_tokens} prompt tokens", over, 0)

    def _refuse(self, reason: str, limit: str, num_tokens: int, num_requests: int) -> None:
        self._on_reject(reason)
        wait_s = max(_MIN_WAIT_S, self._rates.seconds_for(num_tokens, num_requests))
        raise Overloaded(f"the queue is full ({limit}); try again in about {wait_s:.0f} s.", wait_s)


def _queue_after(backlog: Backlog, slots: int, num_new: int) -> int:
    """How many would wait if `num_new` came; zero while all of them find a free slot.

    Requests that the engine has not seen yet take free slots first: without that, a burst on an
    idle server would be refused.
    """
    free = max(0, slots - backlog.num_running - backlog.num_waiting)
    coming = backlog.num_unseen + num_new
    if coming <= free:
        return 0
    return backlog.num_waiting + coming - free
