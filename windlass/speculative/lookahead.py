"""Lookahead decoding: keeps the target's samples after rejected draft tokens, and drafts them later.

Verification samples the target after every draft token, accepted or rejected. The sample after a
draft token extends the n-gram that ends with this draft token (the diagonal of the Jacobi
iteration). The n-grams of a request make a pool by their first token, together with the request's
own text. Where the pool has no entry, the remaining target tokens of the last verification are
drafted, which is the next Jacobi iteration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from windlass.core.types import Draft, SlotId, SlotInit
from windlass.speculative.base import Proposer, SlotUpdate, SpeculationContext

if TYPE_CHECKING:
    from windlass.kernels.storages import Held
    from windlass.runner.assemble import Assembled

_NGRAM = 5  # tokens of a pool entry; the first is its key
_MAX_ENTRIES = 4096  # per request and kind of entry; the oldest are evicted first
# Kinds of drafts: acceptance is counted per kind.
_ITERATED, _SAMPLED, _TEXT = 0, 1, 2
_Entry = TypeVar("_Entry")


class Pool:
    """One request: its text, n-grams by their first token, and its last target tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        # By token: the position after its last occurrence.
        first = max(0, len(tokens) - 1 - _MAX_ENTRIES)
        self._positions = dict(zip(tokens[first:-1], range(first + 1, len(tokens)), strict=True))
        self._sampled: dict[int, tuple[int, ...]] = {}  # by token: sampled followers
        self._ngrams: list[
            tuple[int, ...]
        ] = []  # one per token of the last draft, which it ends with
        self._drafted: tuple[int, ...] = ()
        self._rest: tuple[int, ...] = ()  # target tokens behind the accepted ones

    def update(self, tokens: Sequence[int], target_tokens: Sequence[int]) -> None:
        """Append known tokens, and learn from the target tokens after each draft token."""
        if target_tokens and len(target_tokens) <= 1 + len(self._drafted):
            ngrams = [(), *self._ngrams]
            for at, token in enumerate(target_tokens[1:], start=1):
                for begin in range(len(ngrams[at])):
                    self._add_sampled(*ngrams[at][begin:], token)
            # The next draft has these target tokens at these positions.
            ends = [
                ((*ngram, token))[-_NGRAM + 1 :]
                for ngram, token in zip(ngrams, target_tokens, strict=False)
            ]
            self._ngrams, self._rest = ends[len(tokens) :], tuple(target_tokens[len(tokens) :])
        else:
            self._ngrams, self._rest = [], ()
        own = self._tokens
        for token in tokens:
            _enter(self._positions, own[-1], len(own))
            own.append(token)
        for token in own[
            -_NGRAM - len(tokens) : -1
        ]:  # the text has newer followers of these tokens
            self._sampled.pop(token, None)

    def draft(self, count: int) -> Draft:
        """Draft followers of the last token, n-gram by n-gram; else the last target tokens."""
        drafted: list[int] = []
        kind, last = _ITERATED, self._tokens[-1]
        while len(drafted) < count and (last in self._sampled or last in self._positions):
            kind = kind or (_SAMPLED if last in self._sampled else _TEXT)
            drafted += self._sampled.get(last) or self._text_after(last)
            last = drafted[-1]
        drafted = drafted[:count]
        rest = self._rest[len(drafted) : count]
        tails = self._ngrams[len(drafted) : len(drafted) + len(rest)]
        known = [tuple(drafted[max(0, at - _NGRAM + 2) : at + 1]) for at in range(len(drafted))]
        self._ngrams = [*known, *tails]
        self._drafted = (*drafted, *rest)
        if not self._drafted:  # the iteration may start from any tokens
            self._drafted = tuple(self._tokens[-min(count, _NGRAM) :])
            self._ngrams = [(token,) for token in self._drafted]
        return Draft(self._drafted, kind)

    def has_drafted(self, tokens: tuple[int, ...]) -> bool:
        """Whether the last draft begins with these tokens."""
        return tokens == self._drafted[: len(tokens)]

    def _text_after(self, token: int) -> list[int]:
        """The tokens after the last occurrence of a token in the text."""
        position = self._positions.get(token, len(self._tokens))
        return self._tokens[position : position + _NGRAM - 1]

    def _add_sampled(self, first: int, *followers: int) -> None:
        """Enter sampled followers of a token, unless the text has more of them."""
        if len(followers) >= len(self._text_after(first)):
            _enter(self._sampled, first, followers)


def _enter(entries: dict[int, _Entry], token: int, entry: _Entry) -> None:
    entries.pop(token, None)
    entries[token] = entry
    if len(entries) > _MAX_ENTRIES:
        del entries[next(iter(entries))]


class LookaheadProposer:
    """Owns a pool per slot, made when the slot first drafts."""

    free = True
    in_step = False

    def __init__(self, max_draft_tokens: int) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._slots: dict[SlotId, Pool] = {}
        self._unread: dict[SlotId, list[int]] = {}  # tokens of slots without a pool

    def storages(self) -> Iterator[Held]:
        """No tensors: it reads tokens only."""
        return iter(())

    def admit(self, new: SlotInit) -> None:
        self._unread[new.slot] = list(new.tokens)

    def forget(self, slot: SlotId) -> None:
        self._slots.pop(slot, None)
        self._unread.pop(slot, None)

    def update(self, updates: Sequence[SlotUpdate]) -> None:
        for each in updates:
            if each.slot in self._unread:
                self._unread[each.slot] += each.tokens
            else:
                pool = self._slots[each.slot]
                is_own = pool.has_drafted(each.verified)
                pool.update(each.tokens, each.target_tokens if is_own else ())

    def backlog(self, slot: SlotId) -> int:
        del slot
        return 0

    def propose(self, slots: Sequence[SlotId], draft_length: int) -> list[Draft]:
        del draft_length  # the governor shortens the drafts
        for slot in slots:
            if slot in self._unread:
                self._slots[slot] = Pool(self._unread.pop(slot))
        return [self._slots[slot].draft(self._max_draft_tokens) for slot in slots]


@dataclass(frozen=True, slots=True)
class LookaheadLoader:
    """Needs no weights and no KV cache."""

    max_draft_tokens: int
    token_bytes: int = 0

    def start(self, made: Assembled) -> Proposer:
        del made
        return LookaheadProposer(self.max_draft_tokens)

    def describe(self) -> str:
        return (
            f"lookahead, up to {self.max_draft_tokens} draft tokens, n-grams of up to {_NGRAM} "
            "tokens"
        )


def open_loader(context: SpeculationContext) -> LookaheadLoader:
    return LookaheadLoader(context.config.speculation.max_draft_tokens)
