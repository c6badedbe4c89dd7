"""Tokens to text, piece by piece: never half a character, never part of a stop string.

Knows a tokenizer only by what it can do, so that any tokenizer, or a fake, fits.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from windlass.core.sampling import SamplingParams

_BROKEN = "\ufffd"  # what a decoder prints for bytes that are not yet a whole character


class Tokenizer(Protocol):
    """What the engine and the server ask of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Tokens that stand for no text."""
        ...

    @property
    def max_token_chars(self) -> int:
        """An upper bound of the characters that one token stands for."""
        ...

    def encode(self, text: str, add_special: bool = True) -> list[int]: ...

    def encode_all(self, texts: Sequence[str], add_special: bool = True) -> list[list[int]]:
        """Encode each text by itself, on all cores. Releases the GIL where a text is long."""
        ...

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of `ids`. Releases the GIL where they are many."""
        ...

    def token_text(self, token: int) -> str:
        """The token's own piece of text, special tokens included; for logprobs."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The exact bytes of the token; of half a character too."""
        ...

    def byte_pieces(self, skip_special: bool) -> Mapping[int, bytes] | None:
        """What each token adds to a text, in bytes; None: that depends on its neighbours."""
        ...


class Piece(NamedTuple):
    """New text to send, and the stop string that ended the output, when one did."""

    text: str
    stop: str | None = None


class _Bytes:
    """Text where each token is bytes of its own: what follows from them is at hand at once."""

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

    def rest(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Window:
    """Text where a decoder may join or strip spaces between tokens.

    A window of recent tokens is decoded twice, with and without the newest: what the second has
    more is new text. The window starts some tokens back for the spaces' sake.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._ids: list[int] = []  # of the window
        self._known = 0  # of them, have been turned into text

    def add(self, token: int) -> str:
        self._ids.append(token)
        return self._new(force=False)

    def rest(self) -> str:
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
    """The text of one completion, grown token by token. Owns the held-back tail."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        skip = sampling.skip_special_tokens
        pieces = tokenizer.byte_pieces(skip)
        self._growing = _Window(tokenizer, skip) if pieces is None else _Bytes(pieces)
        self._sampling = sampling
        self._hold = max((len(text) for text in sampling.stop), default=1) - 1
        self._sent = 0
        self.num_tokens = 0
        self.text = ""
        self.stopped_by: str | None = None

    def push(self, tokens: Sequence[int], last: bool = False) -> Piece:
        """Add tokens, return the text that is now certain. `last` lets go of what is held back."""
        if not self._sampling.stop:
            return Piece(self._add(tokens, last))
        for token in tokens:
            self.num_tokens += 1
            if self._grow(self._growing.add(token)):
                break
        if last and self.stopped_by is None:
            self._grow(self._growing.rest())
        done = last or self.stopped_by is not None
        end = len(self.text) if done else max(self._sent, len(self.text) - self._hold)
        piece, self._sent = self.text[self._sent : end], end
        return Piece(piece, self.stopped_by)

    def _add(self, tokens: Sequence[int], last: bool) -> str:
        """Add tokens where nothing is held back: all new text is certain."""
        new = "".join(map(self._growing.add, tokens))
        if last:
            new += self._growing.rest()
        self.num_tokens += len(tokens)
        self.text += new
        return new

    def _grow(self, new: str) -> bool:
        """Add text; cut it at the first stop string that `new` completed. Whether there was one."""
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
