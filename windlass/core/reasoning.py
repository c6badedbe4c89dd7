"""The reasoning phase of an output: its start and end tokens, and its budget."""

from __future__ import annotations

from dataclasses import dataclass

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningPhase:
    """The reasoning part of an output, in token ids.

    start: how it begins; (): the prompt has opened it. An output that begins otherwise has none.
    ends: the sequences after which the answer begins. closing: what is written when `max_tokens` tokens
    of reasoning were; it ends with one of `ends`.
    """

    ends: tuple[TokenIds, ...]
    closing: TokenIds
    start: TokenIds = ()
    max_tokens: int | None = None
