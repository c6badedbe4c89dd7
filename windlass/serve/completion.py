"""A completion on its way to a client: what is sent when, and the numbers it leaves behind.

How tokens become text, scores and an ending is text/completion.py; JSON shapes read the portions
made here.
"""

from __future__ import annotations

import time

from windlass.core.types import Output
from windlass.serve.metrics import Metrics
from windlass.text.completion import Completion, Delta

Portion = Delta  # what is sent at once: the deltas of some steps


class Stopwatch:
    """Tells the metrics when the tokens of one completion came, as its client felt it."""

    def __init__(self, metrics: Metrics, arrived: float) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._first_at: float | None = None
        self._last_at = arrived

    def tokens(self, output: Output) -> None:
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
            if output.timeline is not None:
                self._metrics.first_token(now - self._arrived, output.timeline)
        elif output.tokens:
            self._metrics.next_tokens(now - self._last_at, len(output.tokens))
        self._last_at = now

    def end(self, reason: str, num_tokens: int) -> None:
        decode_s = self._last_at - (self._first_at or self._last_at)
        self._metrics.finished(reason, num_tokens, decode_s, self._last_at - self._arrived)


class Served:
    """One completion that a client waits for.

    `interval` tokens make a portion, except that the first token and the end never wait; None: all
    of it makes one.
    """

    def __init__(self, completion: Completion, watch: Stopwatch, interval: int | None) -> None:
        self.completion = completion
        self.num_cached = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self._watch = watch
        self._interval = interval
        self._num_sent = 0
        self._first = True
        self._pending: Portion | None = None

    @property
    def num_tokens(self) -> int:
        """Generated tokens, up to the one that completed a stop string."""
        return len(self.completion.tokens)

    def feed(self, output: Output) -> Portion | None:
        """Take in a step's output; returns a portion when it is time for one."""
        delta = self.completion.feed(output)
        if not output.tokens and output.finish is None:
            return None  # it brought scores of the prompt
        if delta.logprobs:
            # Portions carry the scores; a long stream must not keep those it has sent.
            self.completion.logprobs.clear()
        if output.timeline is not None:
            self.num_cached = output.timeline.num_cached
            self.num_drafted = output.timeline.num_drafted
            self.num_accepted = output.timeline.num_accepted
        self._watch.tokens(output)
        if delta.finish_reason is not None:
            self._watch.end(delta.finish_reason, self.num_tokens)
        portion = self._pending
        if portion is None:
            portion = delta
            portion.first, self._first = self._first, False
        else:
            portion.add(delta)
        if self._due(portion):
            self._pending, self._num_sent = None, self.num_tokens
            return portion
        if self._pending is None:
            portion.tokens = list(portion.tokens)  # it will grow, and was the output's own
            self._pending = portion
        return None

    def _due(self, portion: Portion) -> bool:
        if portion.finish_reason is not None:
            return True
        if self._interval is None:
            return False
        return self._num_sent == 0 or self.num_tokens - self._num_sent >= self._interval
