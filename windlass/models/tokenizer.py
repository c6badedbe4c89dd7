"""The tokenizer of a model: text to ids and back, over the `tokenizers` library.

Where it comes from is decided elsewhere: tokenizer_files.py (a folder) and gguf_tokenizer.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from windlass.core.card import FimTokens

SPACE = "\u2581"  # SentencePiece's symbol for a space
_LONG_TEXT = 2_000  # characters from which one text is encoded without the GIL
_LONG_IDS = 2_000  # tokens from which they are decoded without the GIL
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TextSide:
    """All that a model's files say about text."""

    backend: Backend
    special_tokens: dict[str, str]  # "eos_token" -> "</s>"
    eos_ids: tuple[int, ...]
    chat_template: str | None
    fim: FimTokens | None = None


class HFTokenizer:
    """Implements `windlass.core.tokenizer.Tokenizer`. Ids outside the vocabulary decode to nothing."""

    def __init__(self, backend: Backend, eos_ids: tuple[int, ...]) -> None:
        self._backend = backend
        self._eos_ids = eos_ids
        self._added = {
            token: added.content for token, added in backend.get_added_tokens_decoder().items()
        }
        self._vocab_size = max(backend.get_vocab_size(), max(self._added, default=-1) + 1)
        added_tokens = backend.get_added_tokens_decoder().items()
        special = frozenset(token for token, added in added_tokens if added.special)
        self._special_ids = tuple(sorted({*special, *eos_ids}))
        self._pieces = {
            skip: _BytePieces(backend, special if skip else frozenset()) for skip in (False, True)
        }

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._eos_ids

    @property
    def special_ids(self) -> tuple[int, ...]:
        return self._special_ids

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return self._backend.encode(text, add_special_tokens=add_special).ids

    @cached_property
    def max_token_chars(self) -> int:
        # A piece has at least as many characters as the text it stands for: one per byte in
        # byte-level vocabularies, six for a byte in SentencePiece's.
        return max(map(len, self._backend.get_vocab()), default=1)

    def encode_all(self, texts: Sequence[str], add_special: bool = True) -> list[list[int]]:
        if len(texts) < 2 and sum(map(len, texts)) < _LONG_TEXT:
            # The library would start its threads for one text too.
            return [self.encode(text, add_special) for text in texts]
        # Unlike `encode`, this releases the GIL.
        found = self._backend.encode_batch_fast(texts, add_special_tokens=add_special)
        return [each.ids for each in found]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
        return [each.ids for each in self._backend.encode_batch_fast(list(pairs))]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        known = [token for token in ids if 0 <= token < self._vocab_size]
        if len(known) < _LONG_IDS:
            return self._backend.decode(known, skip_special_tokens=skip_special)
        # Unlike `decode`, this releases the GIL.
        return self._backend.decode_batch([known], skip_special_tokens=skip_special)[0]

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < self._vocab_size:
            return b""
        added = self._added.get(token)
        piece = self._backend.id_to_token(token) if added is None else added
        if piece is None:
            return b""
        if "ByteLevel" in self._decoders:
            return piece.encode() if added else _piece_bytes(piece)
        if not self._decoders & {"ByteFallback", "Metaspace"}:
            return piece.encode()
        # Added tokens too: Gemma has runs of spaces among them.
        byte = _BYTE_PIECE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE, " ").encode()

    def byte_pieces(self, skip_special: bool) -> Mapping[int, bytes] | None:
        return self._pieces[skip_special] if self._decoders == {"ByteLevel"} else None

    @cached_property
    def _decoders(self) -> set[str]:
        """The kinds of decoder in use, which define how a piece is converted to bytes."""
        if self._backend.decoder is None:
            return set()
        return _kinds(json.loads(self._backend.decoder.__getstate__()))


class _BytePieces(dict[int, bytes]):
    """The bytes of each token under a byte-level decoder, computed on first use."""

    def __init__(self, backend: Backend, skipped: frozenset[int]) -> None:
        super().__init__()
        self._backend = backend
        self._skipped = skipped

    def __missing__(self, token: int) -> bytes:
        piece = None if token in self._skipped else self._backend.id_to_token(token)
        self[token] = found = _piece_bytes(piece or "")
        return found


def _piece_bytes(piece: str) -> bytes:
    """The bytes of a byte-level piece; plain UTF-8 if a character is not in the byte alphabet."""
    found = [_BYTE_OF.get(char) for char in piece]
    return piece.encode() if None in found else b"".join(found)  # type: ignore[arg-type]


def _kinds(state: dict[str, Any]) -> set[str]:
    inner = [_kinds(part) for part in state.get("decoders", [])]
    return {state["type"]}.union(*inner)


def _byte_of_char() -> dict[str, bytes]:
    """Byte-level BPE writes each byte as a visible character: itself, or one from 256 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    table = {chr(byte): bytes([byte]) for byte in visible}
    return table | {chr(256 + index): bytes([byte]) for index, byte in enumerate(hidden)}


_BYTE_OF = _byte_of_char()


def framed(bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> TemplateProcessing:
    """Puts the given tokens before and after every text that is encoded with special tokens."""
    tokens = [token for token in (bos, eos) if token is not None]
    single = [*(["bos"] if bos else []), "$A", *(["eos"] if eos else [])]
    names = [name for name in single if name != "$A"]
    return TemplateProcessing(
        single=single,
        special_tokens=[
            {"id": name, "ids": [token], "tokens": [text]}
            for name, (text, token) in zip(names, tokens, strict=True)
        ],
    )
