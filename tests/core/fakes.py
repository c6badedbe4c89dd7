"""A tokenizer of bytes, for tests that need text but no model."""

from __future__ import annotations

from collections.abc import Sequence


class ByteTokenizer:
    vocab_size = 256
    eos_ids: tuple[int, ...] = (0,)

    def encode(self, text: str, add_special: bool = True) -> list[int]:  # noqa: ARG002
        return list(text.encode("utf-8", "surrogatepass"))

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:  # noqa: ARG002
        return bytes(ids).decode("utf-8", "replace")

    def token_text(self, token: int) -> str:
        return self.decode([token])

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])
