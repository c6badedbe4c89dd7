"""Admission control: bounds queued requests and tokens, and estimates Retry-After.

Knows the size of the backlog and its rate of progress, not the clients or the requests.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from windlass.core.types import EngineStats
from windlass.errors import Overloaded, RequestError
from windlass.serve.fallback import Forecast
from windlass.serve.handle import EngineHandle
from windlass.serve.health import Backlog
from windlass.serve.live_config import LiveConfig

_WINDOW_S = 30.0
_MIN_WAIT_S = 1.0
_MAX_WAIT_S = 60.0

MAX_REQS = "max_num_queued_reqs"
MAX_TOKENS = "max_num_queued_tokens"
SLO_TTFT = "slo_ttft"


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    num_tokens: int
    num_finished: int


class Rates:
    """Measures tokens and requests finished per second over the last 30 seconds."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()
        self._num_tokens = 0

    def observe(self, at: float, num_tokens: int, *, num_finished: int, restart: bool) -> None:
        """Add tokens that an engine has computed, and all requests finished so far.

        `restart`: drop the samples before; idle time does not measure speed.
        """
        self._num_tokens += num_tokens
        if restart:
            self._samples.clear()
        self._samples.append(_Sample(at, self._num_tokens, num_finished))
        while at - self._samples[0].at > _WINDOW_S:
            self._samples.popleft()

    def seconds_for(self, num_tokens: int, num_requests: int) -> float:
        """Estimate the time to process this many tokens and requests; _MIN_WAIT_S without data."""
        first, last = (self._samples[0], self._samples[-1]) if self._samples else (None, None)
        if first is None or last is None or last.at - first.at < _MIN_WAIT_S:
            return _MIN_WAIT_S
        seconds = last.at - first.at
        waits = (
            (num_tokens, last.num_tokens - first.num_tokens),
            (num_requests, last.num_finished - first.num_finished),
        )
        # No progress in the window: the time is unknown, and long.
        estimates = [need * seconds / done if done else _MAX_WAIT_S for need, done in waits if need]
        return min(max(estimates, default=_MIN_WAIT_S), _MAX_WAIT_S)

    @property
    def request_s(self) -> float:
        """Seconds between two requests that finish; 0 without data."""
        if not self._samples or self._samples[-1].num_finished == self._samples[0].num_finished:
            return 0.0
        first, last = self._samples[0], self._samples[-1]
        return (last.at - first.at) / (last.num_finished - first.num_finished)

    def wait_s(self, num_queued: int) -> float:
        """Estimate the time until this many requests have finished; 0 without data.

        If none has finished, one takes at least as long as the samples go back.
        """
        if not self._samples:
            return 0.0
        return num_queued * (self.request_s or self._samples[-1].at - self._samples[0].at)


class Admission(Protocol):
    """Decides whether requests may join the queue."""

    def check_possible(self, num_requests: int) -> None:
        """Raise RequestError if `num_requests` at once exceed the limits even of an idle server."""

    def check(self, num_requests: int, num_tokens: int) -> None:
        """Raise Overloaded if the queue has no room for these requests and their prompt tokens."""


def check_possible(num_requests: int, max_num_seqs: int, max_queued: int) -> None:
    """Raise RequestError if `num_requests` at once exceed the limits even of an idle server."""
    if num_requests > max_num_seqs + max_queued:
        raise RequestError(
            f"the request has {num_requests:,} completions; this server runs {max_num_seqs} at once "
            f"and queues {max_queued}. Send fewer prompts, or a smaller n.",
            "n",
        )


class AdmissionControl:
    """Refuses requests when the queue is full. `on_reject` gets the reason, for the metrics."""

    def __init__(
        self,
        config: LiveConfig,
        client: EngineHandle,
        on_reject: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._client = client
        self._on_reject = on_reject
        self._clock = clock
        self._rates = Rates()

    def observe(self, stats: EngineStats, last: EngineStats) -> None:
        client = self._client
        is_idle = client.backlog.num_running + client.backlog.num_waiting == 0
        # A restarted engine starts slowly.
        self._rates.observe(
            self._clock(),
            _num_computed(stats) - _num_computed(last),
            num_finished=client.num_finished,
            restart=is_idle or last.num_steps == 0,
        )

    def check_possible(self, num_requests: int) -> None:
        """Raise RequestError if `num_requests` at once exceed the limits even of an idle server.

        Called before a body is expanded: 2,000 prompts with n=128 make 256,000 requests.
        """
        max_reqs = self._config.value.max_num_queued_reqs
        check_possible(num_requests, self._client.max_num_seqs, max_reqs)

    def check(self, num_requests: int, num_tokens: int) -> None:
        """Raise Overloaded if the queue has no room for these requests and their prompt tokens."""
        config, backlog = self._config.value, self._client.backlog
        max_reqs, max_tokens = config.max_num_queued_reqs, config.max_num_queued_tokens
        slots = self._client.max_num_seqs
        excess = _queue_after(backlog, slots, num_requests) - max_reqs
        if excess > 0:
            self._refuse(MAX_REQS, f"{max_reqs} requests", num_requests=excess)
        # With an empty queue even a prompt above the limit is accepted: it does not wait.
        if max_tokens is not None and backlog.num_tokens:
            over = backlog.num_tokens + num_tokens - max_tokens
            if over > 0:
                self._refuse(MAX_TOKENS, f"{max_tokens} prompt tokens", num_tokens=over)
        if config.slo_admission:
            self._check_ttft(backlog, num_requests, num_tokens)

    def forecast(self, num_requests: int) -> Forecast:
        """Predict how further requests would fare."""
        return Forecast(self.predicted_wait_s(num_requests), self._client.health().ok)

    def predicted_wait_s(self, num_requests: int) -> float:
        """Predict how long further requests would be queued, as others finish now."""
        num_queued = _queue_after(self._client.backlog, self._client.max_num_seqs, num_requests)
        return self._rates.wait_s(num_queued)

    def _check_ttft(self, backlog: Backlog, num_requests: int, num_tokens: int) -> None:
        """Raise Overloaded if requests ahead would make the first token later than --slo-ttft-ms.

        A prompt that alone takes longer is accepted if it waits no longer than the target.
        """
        stats = [each.stats for each in self._client.replicas]
        found = [each.slo for each in stats if each.slo is not None]
        tokens_per_s = sum(each.prompt_tokens_per_s for each in found)
        if not tokens_per_s or found[0].ttft_s is None:  # nothing was measured yet
            return
        target_s = found[0].ttft_s
        # Which tokens are cached is known only to the engine: assume the usual share.
        num_queries = max(1, sum(each.prefix_queries for each in stats))
        uncached = 1 - sum(each.prefix_hits for each in stats) / num_queries
        own_s = uncached * num_tokens / tokens_per_s
        wait_s = uncached * backlog.num_tokens / tokens_per_s
        num_present = backlog.num_running + backlog.num_waiting + backlog.num_unseen
        num_over = num_present + num_requests - sum(each.num_running for each in found)
        wait_s += self._rates.request_s * max(0, num_over)
        excess_s = wait_s - target_s if own_s > target_s else wait_s + own_s - target_s
        if excess_s > 0:
            self._on_reject(SLO_TTFT)
            raise Overloaded(
                f"the predicted time to the first token is {wait_s + own_s:.2f} s, {wait_s:.2f} s of it "
                f"behind {num_present} requests, at {tokens_per_s:,.0f} prompt tokens per second; the "
                f"server promises {target_s:g} s (--slo-ttft-ms). Try again in about "
                f"{max(_MIN_WAIT_S, excess_s):.0f} s.",
                max(_MIN_WAIT_S, min(excess_s, _MAX_WAIT_S)),
            )

    def _refuse(
        self, reason: str, limit: str, *, num_tokens: int = 0, num_requests: int = 0
    ) -> None:
        self._on_reject(reason)
        wait_s = max(_MIN_WAIT_S, self._rates.seconds_for(num_tokens, num_requests))
        raise Overloaded(f"the queue is full ({limit}); try again in about {wait_s:.0f} s.", wait_s)


def _num_computed(stats: EngineStats) -> int:
    return stats.num_prompt_tokens_computed + stats.num_generated_tokens


def _queue_after(backlog: Backlog, slots: int, num_new: int) -> int:
    """The queue length after `num_new` more requests; zero while all of them get a free slot.

    Requests that the engine has not reported yet take free slots first: otherwise a burst on an
    idle server would be refused.
    """
    free = max(0, slots - backlog.num_running - backlog.num_waiting)
    arriving = backlog.num_unseen + num_new
    if arriving <= free:
        return 0
    return backlog.num_waiting + arriving - free
