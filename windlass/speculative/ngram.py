"""Prompt lookup: drafts the text that followed the same n-gram before, in the prompt or the output.

Costs a dictionary entry per token and touches no tensor. Where the output repeats its input
(editing, summarising, code), most draft tokens are accepted; elsewhere there are few drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from windlass.core.types import Draft, SlotId, SlotInit
from windlass.speculative.base import NO_DRAFT, Proposer, SlotUpdate, SpeculationContext

if TYPE_CHECKING:
    from windlass.kernels.storages import Held
    from windlass.runner.assemble import Assembled


_MAX_CANDIDATES = 64  # earlier occurrences of the same n-gram to compare, the latest first


class Index:
    """The tokens of one request, and the positions that followed each n-gram of minimum length."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._min_ngram, self._max_ngram = min_ngram, max_ngram
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}  # by n-gram: the position after it
        self._earlier: list[int] = []  # by position: the previous one of the same n-gram; 0: none

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. An n-gram is entered once its follower is known: a suffix never matches itself."""
        own, latest, length = self._tokens, self._latest, self._min_ngram
        for position, token in enumerate(tokens, start=len(own)):
            gram = tuple(own[-length:])
            self._earlier.append(latest.get(gram, 0))
            if position >= length:
                latest[gram] = position
            own.append(token)

    def draft(self, count: int) -> Draft:
        """Draft the tokens after the latest earlier occurrence of the longest matching suffix."""
        position = self._latest.get(tuple(self._tokens[-self._min_ngram :]), 0)
        best, longest = 0, 0
        for _ in range(_MAX_CANDIDATES):
            if not position:
                break
            length = self._match_length(position)
            if length > longest:
                best, longest = position, length
            if longest == self._max_ngram:
                break
            position = self._earlier[position]
        return Draft(self._copy(best, count), kind=longest) if longest else NO_DRAFT

    def _match_length(self, position: int) -> int:
        """The number of tokens before `position` that equal the last tokens."""
        own, count = self._tokens, self._min_ngram
        limit = min(self._max_ngram, position)
        while count < limit and own[position - count - 1] == own[-count - 1]:
            count += 1
        return count

    def _copy(self, at: int, count: int) -> tuple[int, ...]:
        """Copy `count` tokens from `at` on; past the end, continue with the draft itself."""
        found = self._tokens[at : at + count]
        period = len(self._tokens) - at
        while len(found) < count:
            found.append(found[len(found) - period])
        return tuple(found)


class NgramProposer:
    """Owns an index per slot, filled when the slot first drafts."""

    free = True
    in_step = False

    def __init__(self, min_ngram: int, max_ngram: int, max_draft_tokens: int) -> None:
        self._min_ngram, self._max_ngram = min_ngram, max_ngram
        self._max_draft_tokens = max_draft_tokens
        self._slots: dict[SlotId, Index] = {}
        self._unread: dict[SlotId, list[int]] = {}

    def storages(self) -> Iterator[Held]:
        """No tensors: it reads tokens only."""
        return iter(())

    def admit(self, new: SlotInit) -> None:
        self._slots[new.slot] = Index(self._min_ngram, self._max_ngram)
        self._unread[new.slot] = list(new.tokens)

    def forget(self, slot: SlotId) -> None:
        self._slots.pop(slot, None)
        self._unread.pop(slot, None)

    def update(self, updates: Sequence[SlotUpdate]) -> None:
        unread = self._unread
        for each in updates:
            unread[each.slot] += each.tokens

    def backlog(self, slot: SlotId) -> int:
        del slot
        return 0

    def propose(self, slots: Sequence[SlotId], draft_length: int) -> list[Draft]:
        del draft_length  # the governor shortens the drafts
        drafts = []
        for slot in slots:
            index, unread = self._slots[slot], self._unread[slot]
            index.extend(unread)
            unread.clear()
            drafts.append(index.draft(self._max_draft_tokens))
        return drafts


@dataclass(frozen=True, slots=True)
class NgramLoader:
    """Needs no weights and no KV cache."""

    min_ngram: int
    max_ngram: int
    max_draft_tokens: int
    token_bytes: int = 0

    def start(self, made: Assembled) -> Proposer:
        del made
        return NgramProposer(self.min_ngram, self.max_ngram, self.max_draft_tokens)

    def describe(self) -> str:
        return (
            f"ngram, up to {self.max_draft_tokens} draft tokens, n-grams of {self.min_ngram} to "
            f"{self.max_ngram} tokens"
        )


def open_loader(context: SpeculationContext) -> NgramLoader:
    options = context.config.speculation
    return NgramLoader(options.spec_ngram_min, options.spec_ngram_max, options.max_draft_tokens)
