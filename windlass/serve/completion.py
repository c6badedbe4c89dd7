"""One completion as it grows: tokens from the engine become text, log probabilities and numbers.

Knows nothing of HTTP or of JSON shapes; those read the deltas made here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from windlass.core.text import TextStream, Tokenizer
from windlass.core.types import NewRequest, Output, TokenLogprob
from windlass.serve.metrics import Metrics


@dataclass(slots=True)
class Delta:
    """What is new in a completion. `finish_reason` set: the last one."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    first: bool = False


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


class Completion:
    """Owns the text and the counts of one completion.

    `interval` tokens make a delta, except that the first token and the end never wait; None: all of
    it makes one.
    """

    def __init__(
        self,
        index: int,
        request: NewRequest,
        tokenizer: Tokenizer,
        watch: Stopwatch,
        interval: int | None,
    ) -> None:
        self.index = index
        self.request = request
        self.num_cached = 0
        self.prompt_logprobs: list[TokenLogprob] = []
        self._stream = TextStream(tokenizer, request.sampling)
        self._watch = watch
        self._interval = interval
        self._num_sent = 0
        self._num_tokens = 0
        self._pending = Delta(index, first=True)

    @property
    def num_tokens(self) -> int:
        """Generated tokens, up to the one that completed a stop string."""
        return self._num_tokens

    def feed(self, output: Output) -> Delta | None:
        """Take in a step's output; returns a delta when it is time for one."""
        if output.prompt_logprobs:
            missing = len(self.request.prompt) - 1 - len(self.prompt_logprobs)
            self.prompt_logprobs.extend(output.prompt_logprobs[: max(0, missing)])
        if not output.tokens and output.finish is None:
            return None
        if self._num_tokens == 0 and output.timeline is not None:
            self.num_cached = output.timeline.num_cached
        self._watch.tokens(output)
        self._take(output)
        if self._pending.finish_reason is not None:
            self._watch.end(self._pending.finish_reason, self._num_tokens)
        if not self._due():
            return None
        delta, self._pending = self._pending, Delta(self.index)
        self._num_sent = self._num_tokens
        return delta

    def _due(self) -> bool:
        if self._pending.finish_reason is not None:
            return True
        if self._interval is None:
            return False
        return self._num_sent == 0 or self._num_tokens - self._num_sent >= self._interval

    def _take(self, output: Output) -> None:
        pending, tokens = self._pending, output.tokens
        shown = tokens
        hide_stop = not self.request.sampling.include_stop_str_in_output
        if output.stop_token is not None and hide_stop:
            shown = tokens[:-1]  # it ended the text and is not part of it
        piece = self._stream.push(shown, last=output.finish is not None)
        num_kept = self._stream.num_tokens - self._num_tokens
        kept = tokens if piece.stop is None else tokens[:num_kept]
        self._num_tokens += len(kept)
        pending.text += piece.text
        pending.tokens.extend(kept)
        pending.logprobs.extend((output.logprobs or [])[: min(len(kept), len(shown))])
        if piece.stop is not None:
            pending.finish_reason, pending.stop_reason = "stop", piece.stop
        elif output.finish is not None:
            pending.finish_reason = output.finish
            pending.stop_reason = self._stop_id(output)

    def _stop_id(self, output: Output) -> int | None:
        """A stop token that the client named; the model's own end is no news."""
        named = output.stop_token in self.request.sampling.stop_token_ids
        return output.stop_token if named else None
