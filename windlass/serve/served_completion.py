"""Decides when the output of a completion is sent to its client, and measures its latencies.

text/completion.py turns tokens into text; formatters.py turns the deltas of this module into JSON.
"""

from __future__ import annotations

import time

from windlass.core.types import Output, Timeline
from windlass.serve.metrics import Metrics
from windlass.text.completion import Completion, Delta


class TokenTimer:
    """Reports the token latencies of one completion, as its client sees them, to the metrics."""

    def __init__(self, metrics: Metrics, arrived: float, tenant: str) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._tenant = tenant
        self.first_at: float | None = None
        self.last_at = arrived
        self._timeline: Timeline | None = None

    def tokens(self, output: Output) -> None:
        now = time.monotonic()
        if output.timeline is not None:
            self._timeline = output.timeline
        if self.first_at is None:
            self.first_at = now
            if output.timeline is not None:
                self._metrics.first_token(now - self._arrived, output.timeline, self._tenant)
        elif output.tokens:
            self._metrics.next_tokens(now - self.last_at, len(output.tokens))
        self.last_at = now

    def end(self, reason: str, num_tokens: int) -> None:
        decode_s = self.last_at - (self.first_at or self.last_at)
        total_s = self.last_at - self._arrived
        self._metrics.finished(
            reason,
            num_tokens=num_tokens,
            decode_s=decode_s,
            total_s=total_s,
            tenant=self._tenant,
            timeline=self._timeline,
        )


class ServedCompletion:
    """One completion of an HTTP request; merges the deltas of several steps into one.

    A merged delta has `interval` tokens, but the first token and the end are sent at once. None:
    all output is one delta.
    """

    def __init__(self, completion: Completion, timer: TokenTimer, interval: int | None) -> None:
        self.completion = completion
        self.num_cached = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self.timer = timer
        self._interval = interval
        self._num_sent = 0
        self._first = True
        self._pending: Delta | None = None

    def restarted(self) -> ServedCompletion:
        """The completion without output. Latencies count from its first output of all."""
        return ServedCompletion(self.completion.restarted(), self.timer, self._interval)

    @property
    def num_tokens(self) -> int:
        """Generated tokens, up to the one that completed a stop string."""
        return len(self.completion.tokens)

    def feed(self, output: Output) -> Delta | None:
        """Add the output of a step; returns a delta if one is due."""
        delta = self.completion.feed(output)
        if not output.tokens and output.finish is None:
            return None  # it has only prompt logprobs
        if delta.logprobs:
            # Deltas carry the logprobs; a long stream must not keep those that were sent.
            self.completion.logprobs.clear()
        if output.timeline is not None:
            self.completion.timeline = output.timeline
            self.num_cached = output.timeline.num_cached
            self.num_drafted = output.timeline.num_drafted
            self.num_accepted = output.timeline.num_accepted
        self.timer.tokens(output)
        if delta.finish_reason is not None:
            self.timer.end(delta.finish_reason, self.num_tokens)
        merged = self._pending
        if merged is None:
            merged = delta
            merged.first, self._first = self._first, False
        else:
            merged.add(delta)
        if self._is_due(merged):
            self._pending, self._num_sent = None, self.num_tokens
            return merged
        if self._pending is None:
            merged.tokens = list(merged.tokens)  # a copy: the list belongs to `output`
            self._pending = merged
        return None

    def _is_due(self, delta: Delta) -> bool:
        if delta.finish_reason is not None:
            return True
        if self._interval is None:
            return False
        return self._num_sent == 0 or self.num_tokens - self._num_sent >= self._interval
