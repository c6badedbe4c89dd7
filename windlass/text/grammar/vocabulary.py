"""A model's tokens in the shape that llguidance reads, for the engine and the sandbox."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from windlass.core.tokenizer import Tokenizer
from windlass.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLTokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes of each token. Special tokens match no text, not even their own spelling."""

    tokens: list[bytes]
    eos_ids: list[int]
    special_ids: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
        """Read a tokenizer. `vocab_size` is the number of logits."""
        count = min(tokenizer.vocab_size, vocab_size)
        tokens = [tokenizer.token_bytes(token) for token in range(count)]
        return cls(tokens, list(tokenizer.eos_ids), list(tokenizer.special_ids))

    @property
    def special_texts(self) -> dict[str, int]:
        """The ids of special tokens by their spelling."""
        return {self.tokens[i].decode(errors="replace"): i for i in self.special_ids}

    def packed(self) -> tuple[bytes, bytes]:
        """The lengths of all tokens, and their concatenated bytes."""
        return array("I", map(len, self.tokens)).tobytes(), b"".join(self.tokens)

    @classmethod
    def unpacked(
        cls, lengths: bytes, joined: bytes, *, eos_ids: list[int], special_ids: list[int]
    ) -> Vocabulary:
        """Reverse `packed`."""
        counts, tokens, at = array("I"), [], 0
        counts.frombytes(lengths)
        for count in counts:
            tokens.append(joined[at : at + count])
            at += count
        return cls(tokens, eos_ids, special_ids)


class _Source:
    """A vocabulary with the attributes that llguidance reads."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]]) -> None:
        self.tokens = vocabulary.tokens
        self.eos_token_id = vocabulary.eos_ids[0]
        self.special_token_ids = vocabulary.special_ids
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode(errors="replace"))


def make_tokenizer(vocabulary: Vocabulary, encode: Callable[[str], list[int]]) -> LLTokenizer:
    """Make llguidance's tokenizer. `encode` gives the tokens of text that a grammar forces."""
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError as error:
        raise RequestError(
            "the package llguidance is not installed where the engine runs. Install it with "
            "pip install llguidance.",
            "structured_outputs",
        ) from error
    source = TokenizerWrapper(_Source(vocabulary, encode))
    return LLTokenizer(source, eos_token=vocabulary.eos_ids)
