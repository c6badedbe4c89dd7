"""The tokenizer as the engine and the server see it. models/tokenizer.py implements it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """The tokenizer interface of the engine and the server."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Special tokens, which have no text."""
        ...

    @property
    def max_token_chars(self) -> int:
        """Upper bound of the characters in one token."""
        ...

    def encode(self, text: str, add_special: bool = True) -> list[int]: ...

    def encode_all(self, texts: Sequence[str], add_special: bool = True) -> list[list[int]]:
        """Encode each text on its own, in parallel. Releases the GIL for long texts."""
        ...

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
        """Encode two texts as one prompt, with the special tokens that the tokenizer has for pairs."""
        ...

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of `ids`. Releases the GIL for long lists."""
        ...

    def token_text(self, token: int) -> str:
        """The text of one token, special tokens included; for logprobs."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, which may be part of a character."""
        ...

    def byte_pieces(self, skip_special: bool) -> Mapping[int, bytes] | None:
        """The bytes of each token; None when they depend on neighbouring tokens."""
        ...
