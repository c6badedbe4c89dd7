"""Incremental detokenisation: never half a character, never part of a stop string.

Depends on the `Tokenizer` protocol only, so that tests can use a fake.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from windlass.core.sampling import SamplingParams
from windlass.core.tokenizer import Tokenizer

_BROKEN = "\ufffd"  # decoders print it for an incomplete character


class TextDelta(NamedTuple):
    """New text to send, and the stop string that finished the output, if any."""

    text: str
    stop: str | None = None


class _Bytes:
    """Decodes tokens whose bytes do not depend on their neighbours."""

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._half = False  # whether the decoder holds part of a character

    def add(self, token: int) -> str:
        piece = self._pieces[token]
        if not self._half:
            try:
                return piece.decode()  # whole characters, as nearly always
            except UnicodeDecodeError:
                pass
        new = self._decoder.decode(piece)
        self._half = bool(self._decoder.getstate()[0])
        return new

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Window:
    """Decodes tokens for decoders that join or strip spaces between them.

    A window of recent tokens is decoded with and without the newest token; the difference is the
    new text. The window starts some tokens back, so that spaces come out right.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._ids: list[int] = []  # of the window
        self._known = 0  # tokens of the window that were already decoded

    def add(self, token: int) -> str:
        self._ids.append(token)
        return self._new(force=False)

    def flush(self) -> str:
        return self._new(force=True)

    def _new(self, force: bool) -> str:
        before = self._tokenizer.decode(self._ids[: self._known], self._skip)
        after = self._tokenizer.decode(self._ids, self._skip)
        if len(after) <= len(before) or (after.endswith(_BROKEN) and not force):
            return ""
        self._ids = self._ids[self._known :]
        self._known = len(self._ids)
        return after[len(before) :]


class TextStream:
    """The text of one completion. Owns the held-back tail."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        skip = sampling.skip_special_tokens
        pieces = tokenizer.byte_pieces(skip)
        self._decoder = _Window(tokenizer, skip) if pieces is None else _Bytes(pieces)
        self._sampling = sampling
        self._hold = max((len(text) for text in sampling.stop), default=1) - 1
        self._sent = 0
        self.num_tokens = 0
        self.text = ""
        self.stopped_by: str | None = None

    def push(self, tokens: Sequence[int], last: bool = False) -> TextDelta:
        """Add tokens and return the text that is final. `last` releases the held-back tail."""
        if not self._sampling.stop:
            return TextDelta(self._add(tokens, last))
        for token in tokens:
            self.num_tokens += 1
            if self._grow(self._decoder.add(token)):
                break
        if last and self.stopped_by is None:
            self._grow(self._decoder.flush())
        done = last or self.stopped_by is not None
        end = len(self.text) if done else max(self._sent, len(self.text) - self._hold)
        piece, self._sent = self.text[self._sent : end], end
        return TextDelta(piece, self.stopped_by)

    def _add(self, tokens: Sequence[int], last: bool) -> str:
        """Add tokens without stop strings: all new text is final."""
        new = "".join(map(self._decoder.add, tokens))
        if last:
            new += self._decoder.flush()
        self.num_tokens += len(tokens)
        self.text += new
        return new

    def _grow(self, new: str) -> bool:
        """Add text and cut it at the first stop string; returns whether there was one."""
        self.text += new
        if not new or self.num_tokens <= self._sampling.min_tokens:
            return False
        start = max(0, len(self.text) - len(new) - self._hold)
        found = [(self.text.find(stop, start), stop) for stop in self._sampling.stop]
        hits = [(at, stop) for at, stop in found if at >= 0]
        if not hits:
            return False
        at, self.stopped_by = min(hits)
        keep = at + len(self.stopped_by) if self._sampling.include_stop_str_in_output else at
        self.text = self.text[:keep]
        return True
