"""A byte tokenizer, for tests that need text but no model."""

from __future__ import annotations

from collections.abc import Sequence


class ByteTokenizer:
    vocab_size = 256
    eos_ids: tuple[int, ...] = (0,)

    def __init__(self, pieces: bool = False) -> None:
        self.pieces = pieces  # whether `byte_pieces` is supported

    def encode(self, text: str, add_special: bool = True) -> list[int]:  # noqa: ARG002
        return list(text.encode("utf-8", "surrogatepass"))

    def encode_all(self, texts: Sequence[str], add_special: bool = True) -> list[list[int]]:
        return [self.encode(text, add_special) for text in texts]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:  # noqa: ARG002
        return bytes(ids).decode("utf-8", "replace")

    def token_text(self, token: int) -> str:
        return self.decode([token])

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])

    def byte_pieces(self, skip_special: bool) -> dict[int, bytes] | None:  # noqa: ARG002
        return {token: bytes([token]) for token in range(256)} if self.pieces else None
