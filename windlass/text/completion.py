"""One completion: turns the engine's tokens into text, logprobs and a finish reason.

The server and the offline API share it. It knows neither HTTP nor clocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from windlass.core.tokenizer import Tokenizer
from windlass.core.types import NewRequest, Output, Timeline, TokenLogprob
from windlass.text.stream import TextStream


@dataclass(slots=True)
class Delta:
    """New text and tokens of a completion. `finish_reason` is set on the last delta."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    first: bool = False

    def add(self, later: Delta) -> None:
        """Append a later delta."""
        self.text += later.text
        self.tokens += later.tokens
        self.logprobs += later.logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


class Completion:
    """Owns the text, tokens and logprobs of one completion."""

    def __init__(self, index: int, request: NewRequest, tokenizer: Tokenizer) -> None:
        self.index = index
        self.request = request
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.timeline: Timeline | None = None  # the last one, where the owner keeps it
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer, request.sampling)

    def restarted(self) -> Completion:
        """The completion without output."""
        return Completion(self.index, self.request, self._tokenizer)

    @property
    def text(self) -> str:
        return self._stream.text

    def feed(self, output: Output) -> Delta:
        """Process a step's output. A stop string found here finishes the completion early."""
        _, tokens, logprobs, prompt_logprobs, finish, stop_token, *_ = output
        if prompt_logprobs:
            self.prompt_logprobs += prompt_logprobs
        shown = kept = tokens
        if stop_token is not None and not self.request.sampling.include_stop_str_in_output:
            shown = shown[:-1]  # the stop token is not part of the text
        text, stop = self._stream.push(shown, finish is not None)
        if stop is not None:
            kept = kept[: self._stream.num_tokens - len(self.tokens)]
            self.finish_reason, self.stop_reason = "stop", stop
        elif finish is not None:
            self.finish_reason = finish
            if finish == "deadline":  # clients know no such reason: the output is cut short
                self.finish_reason, self.stop_reason = "length", finish
            if stop_token in self.request.sampling.stop_token_ids:
                self.stop_reason = stop_token  # EOS is not reported as a stop reason
        self.tokens += kept
        scores = logprobs[: min(len(kept), len(shown))] if logprobs else []
        if scores:
            self.logprobs += scores
        return Delta(
            index=self.index,
            text=text,
            tokens=kept,
            logprobs=scores,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
