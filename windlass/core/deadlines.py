"""Deadlines of requests: which have passed, and which cannot be met any more.

Callers pass the time and the measured rates in. A step without a deadline that is due costs one
comparison.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

from windlass.core.request import Request

# Each drop by a prediction makes the next prediction more optimistic by this factor, until a prompt is
# computed again. Otherwise rates measured on a slow machine would drop requests forever.
_OPTIMISM = 0.9


class Rates(NamedTuple):
    """Measured speed of the engine; 0 seconds: not measured yet."""

    prompt_token_s: float = 0.0  # seconds per prompt token
    output_token_s: float = 0.0  # seconds per generated token of one request
    num_measured: int = 0  # prompt tokens so far


class LateRequest(NamedTuple):
    """A request that ends because of its deadline."""

    request: Request
    reason: str  # for the metrics: predicted, queued, prefill or decode
    message: str


class Deadlines:
    """Owns the deadlines of all requests, in a heap by the time of their next check."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._num_ended = 0  # approximate number of ended requests in the heap
        self._optimism = 1.0
        self._num_measured = 0  # prompt tokens at the last prediction
        self.num_ended: dict[str, int] = {}  # by reason

    def __bool__(self) -> bool:
        return bool(self._heap)

    def enter(self, request: Request) -> None:
        """Watch a request that has a deadline. Its first check is at the next plan."""
        heapq.heappush(self._heap, (0.0, request.arrival, request))

    def leave(self) -> None:
        """Note that a request has ended; ended requests are at most half of those kept."""
        self._num_ended += 1
        if 2 * self._num_ended > len(self._heap):
            self._heap = [each for each in self._heap if each[2].finish is None]
            heapq.heapify(self._heap)
            self._num_ended = 0

    def late(
        self, now: float, rates: Callable[[], Rates], num_cached: Callable[[Request], int]
    ) -> list[LateRequest]:
        """The requests to end now: past their deadline, or queued without a chance to meet it.

        `num_cached` returns how many prompt tokens of a queued request need not be computed.
        """
        found = []
        while self._heap and self._heap[0][0] <= now:
            request = heapq.heappop(self._heap)[2]
            if request.finish is not None:
                continue
            assert request.deadline is not None
            late = self._expired(request, now) if now >= request.deadline else None
            look_at = request.deadline
            if late is None and request.slot is None and request.num_output == 0:
                late, look_at = self._predict(request, now, rates(), num_cached(request))
            if late is None:
                heapq.heappush(self._heap, (look_at, request.arrival, request))
            else:
                self.num_ended[late.reason] = self.num_ended.get(late.reason, 0) + 1
                found.append(late)
        return found

    def _expired(self, request: Request, now: float) -> LateRequest:
        given_s = (request.deadline or now) - request.timeline.arrived
        if request.num_output:
            message = f"its deadline passed after {request.num_output:,} output tokens"
            return LateRequest(request, "decode", message)
        if request.timeline.admitted is None:
            message = f"the deadline passed after {_time(given_s)} in the queue"
            return LateRequest(request, "queued", f"{message}; no token was computed.")
        message = (
            f"the deadline passed {_time(given_s)} after the request's arrival, when "
            f"{request.computed:,} of its {request.num_prompt:,} prompt tokens were computed."
        )
        return LateRequest(request, "prefill", message)

    def _predict(
        self, request: Request, now: float, rates: Rates, num_cached: int
    ) -> tuple[LateRequest | None, float]:
        """End a queued request that could not be ready in time if it started now.

        Otherwise returns the time of the next check: its latest start at these rates.
        """
        assert request.deadline is not None
        if rates.num_measured != self._num_measured:
            self._num_measured, self._optimism = rates.num_measured, 1.0
        num_prompt = request.num_prompt - num_cached
        num_output = max(1, request.sampling.min_tokens)
        need_s = num_prompt * rates.prompt_token_s + (num_output - 1) * rates.output_token_s
        latest_start = request.deadline - need_s * self._optimism
        if latest_start > now or need_s == 0.0:
            return None, max(latest_start, now) if need_s else request.deadline
        self._optimism *= _OPTIMISM
        outputs = ""
        if num_output > 1:
            each_s = _time(rates.output_token_s)
            outputs = f", and at least {num_output:,} output tokens at {each_s} per token"
        message = (
            f"the deadline cannot be met: it is in {_time(request.deadline - now)}, and the answer "
            f"takes at least {_time(need_s)} at the measured rates: {num_prompt:,} prompt tokens "
            f"({num_cached:,} more are cached) at {_time(rates.prompt_token_s)} per token{outputs}. "
            "Send a shorter prompt, or allow more time."
        )
        return LateRequest(request, "predicted", message), 0.0


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{1000 * max(0.0, seconds):.2g} ms"
