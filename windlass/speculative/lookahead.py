"""Lookahead decoding: what the model said after wrong guesses is kept, and guessed where it fits.

Verification computes what follows every guess, right or wrong. Each such pair of a guess and its
follower continues the chain that the guess ended (the Jacobi iteration, read along its diagonal),
and the chains of a request make a pool by their first token, together with what it was given and
has said. Where the pool has nothing, the rest of the last trail is guessed: the next iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from windlass.core.types import SlotId, SlotInit
from windlass.speculative.base import Draft, Proposer, Seen, SpeculationContext

if TYPE_CHECKING:
    from windlass.runner.assemble import Assembled

_CHAIN = 5  # tokens of an entry, the first of which it is found by
_ENTRIES = 4096  # of a request, of either kind; the oldest go first
# Kinds of drafts: acceptance is counted by them.
_ITERATED, _SAID, _KNOWN = 0, 1, 2
_Entry = TypeVar("_Entry")


class Pool:
    """One request: its text, chains by their first token, and the trail of its last verification."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        # By token: the place of what followed it last.
        first = max(0, len(tokens) - 1 - _ENTRIES)
        self._places = dict(zip(tokens[first:-1], range(first + 1, len(tokens)), strict=True))
        self._said: dict[int, tuple[int, ...]] = {}  # by token: what was said to follow it
        self._chains: list[tuple[int, ...]] = []  # that end in each guess of the last draft
        self._drafted: tuple[int, ...] = ()
        self._rest: tuple[int, ...] = ()  # said beyond what is known

    def take_in(self, tokens: Sequence[int], target_tokens: Sequence[int]) -> None:
        """Tokens that are known now, and what was said after each guess."""
        if target_tokens and len(target_tokens) <= 1 + len(self._drafted):
            chains = [(), *self._chains]
            for at, said in enumerate(target_tokens[1:], start=1):
                for begin in range(len(chains[at])):
                    self._hear(*chains[at][begin:], said)
            # The next draft's guesses at these places are what was said there.
            ends = [
                ((*chain, said))[-_CHAIN + 1 :]
                for chain, said in zip(chains, target_tokens, strict=False)
            ]
            self._chains, self._rest = ends[len(tokens) :], tuple(target_tokens[len(tokens) :])
        else:
            self._chains, self._rest = [], ()
        own = self._tokens
        for token in tokens:
            _enter(self._places, own[-1], len(own))
            own.append(token)
        for token in own[-_CHAIN - len(tokens) : -1]:  # of these the text says more than before
            self._said.pop(token, None)

    def guess(self, count: int) -> Draft:
        """Followers of the last token, chain by chain; else what the last trail says."""
        guesses: list[int] = []
        kind, last = _ITERATED, self._tokens[-1]
        while len(guesses) < count and (last in self._said or last in self._places):
            kind = kind or (_SAID if last in self._said else _KNOWN)
            guesses += self._said.get(last) or self._known(last)
            last = guesses[-1]
        guesses = guesses[:count]
        rest = self._rest[len(guesses) : count]
        tails = self._chains[len(guesses) : len(guesses) + len(rest)]
        known = [tuple(guesses[max(0, at - _CHAIN + 2) : at + 1]) for at in range(len(guesses))]
        self._chains = [*known, *tails]
        self._drafted = (*guesses, *rest)
        if not self._drafted:  # any guess begins the iteration
            self._drafted = tuple(self._tokens[-min(count, _CHAIN) :])
            self._chains = [(token,) for token in self._drafted]
        return Draft(self._drafted, kind)

    def _known(self, token: int) -> list[int]:
        """What followed a token in the text."""
        place = self._places.get(token, len(self._tokens))
        return self._tokens[place : place + _CHAIN - 1]

    def _hear(self, first: int, *followers: int) -> None:
        """Enter what was said after a wrong guess, unless the text itself tells more."""
        if len(followers) >= len(self._known(first)):
            _enter(self._said, first, followers)


def _enter(entries: dict[int, _Entry], token: int, entry: _Entry) -> None:
    entries.pop(token, None)
    entries[token] = entry
    if len(entries) > _ENTRIES:
        del entries[next(iter(entries))]


class LookaheadProposer:
    """Owns a pool for each slot, made when guesses are first wanted of it."""

    free = True
    in_step = False

    def __init__(self, most: int) -> None:
        self._most = most
        self._slots: dict[SlotId, Pool] = {}
        self._begun: dict[SlotId, list[int]] = {}

    def admit(self, new: SlotInit) -> None:
        self._begun[new.slot] = list(new.tokens)

    def forget(self, slot: SlotId) -> None:
        self._slots.pop(slot, None)
        self._begun.pop(slot, None)

    def begin(self, wanted: int) -> None:
        """How many is the governor's business."""

    def take_in(self, seen: Sequence[Seen]) -> None:
        for each in seen:
            if each.slot in self._begun:
                self._begun[each.slot] += each.tokens
            else:
                self._slots[each.slot].take_in(each.tokens, each.target_tokens)

    def backlog(self, slot: SlotId, num_tokens: int) -> int:
        del slot, num_tokens
        return 0

    def propose(self, slots: Sequence[SlotId]) -> list[Draft]:
        for slot in slots:
            if slot in self._begun:
                self._slots[slot] = Pool(self._begun.pop(slot))
        return [self._slots[slot].guess(self._most) for slot in slots]


@dataclass(frozen=True, slots=True)
class LookaheadLoader:
    """Needs no weights and no pages."""

    most: int
    token_bytes: int = 0

    def start(self, made: Assembled) -> Proposer:
        del made
        return LookaheadProposer(self.most)

    def describe(self) -> str:
        return f"lookahead, up to {self.most} guesses, chains of up to {_CHAIN} tokens"


def open_loader(context: SpeculationContext) -> LookaheadLoader:
    return LookaheadLoader(context.config.speculation.max_draft_tokens)
