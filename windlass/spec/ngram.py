"""Prompt lookup: the text that followed the same few tokens before, in the prompt or the output.

Costs a few dictionary entries per token and touches no tensor. Where the output repeats what it
was given (editing, summarising, code), most guesses are right; elsewhere there are few.
"""

from __future__ import annotations

from collections.abc import Sequence

from windlass.core.types import SlotId
from windlass.spec.base import NO_DRAFT, Draft, Seen


class Index:
    """The tokens of one request, and where each of their n-grams was last followed by something."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """`lengths` of n-grams, the longest first."""
        self._tokens: list[int] = []
        self._after: list[tuple[int, dict[tuple[int, ...], int]]] = [(n, {}) for n in lengths]

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens. An n-gram is entered when its follower is known, so none finds itself."""
        own = self._tokens
        for token in tokens:
            end = len(own)
            for length, after in self._after:
                if end >= length:
                    after[tuple(own[end - length :])] = end
            own.append(token)

    def guess(self, count: int) -> Draft:
        """What followed the latest earlier occurrence of the longest n-gram at the end."""
        own = self._tokens
        for length, after in self._after:
            if len(own) < length:
                continue
            at = after.get(tuple(own[-length:]))
            if at is not None:
                return Draft(self._copy(at, count), kind=length)
        return NO_DRAFT

    def _copy(self, at: int, count: int) -> tuple[int, ...]:
        """`count` tokens from `at` on; past the end the guesses themselves are what follows."""
        found = self._tokens[at : at + count]
        period = len(self._tokens) - at
        while len(found) < count:
            found.append(found[len(found) - period])
        return tuple(found)


class NgramProposer:
    """Owns an index for each slot. Drafts are kept up to date by what the runner accepted."""

    lookahead = 0
    wants: tuple[int, ...] = ()

    def __init__(self, shortest: int, longest: int, most: int) -> None:
        """N-grams of `longest` down to `shortest` tokens; at most `most` guesses."""
        self._lengths = tuple(range(longest, shortest - 1, -1))
        self._most = most
        self._slots: dict[SlotId, Index] = {}

    def admit(self, slot: SlotId, tokens: Sequence[int]) -> None:
        index = self._slots[slot] = Index(self._lengths)
        index.extend(tokens)

    def forget(self, slot: SlotId) -> None:
        self._slots.pop(slot, None)

    def propose(self, seen: Sequence[Seen]) -> list[Draft]:
        drafts = []
        for slot, tokens in seen:
            index = self._slots[slot]
            index.extend(tokens)
            drafts.append(index.guess(self._most))
        return drafts
