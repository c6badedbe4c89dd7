"""Tokens to text, piece by piece: never half a character, never part of a stop string.

Knows a tokenizer only by what it can do, so that any tokenizer, or a fake, fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from windlass.core.sampling import SamplingParams

_BROKEN = "\ufffd"  # what a decoder prints for bytes that are not yet a whole character


class Tokenizer(Protocol):
    """What the engine and the server ask of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str, add_special: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...

    def token_text(self, token: int) -> str:
        """The token's own piece of text, special tokens included; for logprobs."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The exact bytes of the token; of half a character too."""
        ...


class Piece(NamedTuple):
    """New text to send, and the stop string that ended the output, when one did."""

    text: str
    stop: str | None = None


class TextStream:
    """The text of one completion, grown token by token. Owns the held-back tail.

    A window of recent tokens is decoded twice, with and without the newest: what the second has
    more is new text. The window starts some tokens back since a decoder may join or strip spaces.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._hold = max((len(text) for text in sampling.stop), default=1) - 1
        self._ids: list[int] = []
        self._window_start = 0
        self._window_end = 0  # tokens before it have been turned into text
        self._sent = 0
        self.text = ""
        self.stopped_by: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def push(self, tokens: Sequence[int], last: bool = False) -> Piece:
        """Add tokens, return the text that is now certain. `last` lets go of what is held back."""
        for token in tokens:
            self._ids.append(token)
            grown = self._decode_new(force=False)
            if self._find_stop(grown):
                break
        if last and self.stopped_by is None:
            self._find_stop(self._decode_new(force=True))
        done = last or self.stopped_by is not None
        end = len(self.text) if done else max(self._sent, len(self.text) - self._hold)
        piece, self._sent = self.text[self._sent : end], end
        return Piece(piece, self.stopped_by)

    def _decode_new(self, force: bool) -> int:
        """Turn the tokens since the window's end into text; returns how many characters it gave."""
        skip = self._sampling.skip_special_tokens
        before = self._tokenizer.decode(self._ids[self._window_start : self._window_end], skip)
        after = self._tokenizer.decode(self._ids[self._window_start :], skip)
        if len(after) <= len(before) or (after.endswith(_BROKEN) and not force):
            return 0
        new = after[len(before) :]
        self.text += new
        self._window_start, self._window_end = self._window_end, len(self._ids)
        return len(new)

    def _find_stop(self, grown: int) -> bool:
        """Cut the text at the first stop string that the last `grown` characters completed."""
        if not grown or not self._sampling.stop or len(self._ids) <= self._sampling.min_tokens:
            return False
        start = max(0, len(self.text) - grown - self._hold)
        found = [(self.text.find(stop, start), stop) for stop in self._sampling.stop]
        hits = [(at, stop) for at, stop in found if at >= 0]
        if not hits:
            return False
        at, self.stopped_by = min(hits)
        keep = at + len(self.stopped_by) if self._sampling.include_stop_str_in_output else at
        self.text = self.text[:keep]
        return True
