"""Lookahead decoding: what the model said after wrong guesses is kept, and guessed where it fits.

Verification computes what follows every guess, right or wrong. Each such pair of a guess and its
follower continues the chain that the guess ended (the Jacobi iteration, read along its diagonal),
and the chains of a request make a pool by their first token, together with what it was given and
has said. Where the pool has nothing, the rest of the last trail is guessed: the next iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from windlass.core.types import SlotId, StepPlan
from windlass.spec.base import Draft, Proposer, Seen, Site

if TYPE_CHECKING:
    from windlass.runner.assemble import Assembled

_CHAIN = 5  # tokens of an entry, the first of which it is found by
_ENTRIES = 8192  # of a request; the oldest go first
# Kinds of drafts: acceptance is counted by them.
_ITERATED, _SAID, _KNOWN = 0, 1, 2


class Pool:
    """Chains of one request by their first token, and the trail of its last verification."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._entries: dict[int, tuple[int, tuple[int, ...]]] = {}  # kind and followers
        self._recent = list(tokens[-_CHAIN:])
        self._chains: list[tuple[int, ...]] = []  # that end in each guess of the last draft
        self._drafted: tuple[int, ...] = ()
        self._rest: tuple[int, ...] = ()  # said beyond what is known
        for at in range(max(0, len(tokens) - _ENTRIES), len(tokens) - 1):
            self._enter(_KNOWN, tuple(tokens[at : at + _CHAIN]))

    def take_in(self, tokens: Sequence[int], trail: Sequence[int]) -> None:
        """Tokens that are known now, and what was said after each guess."""
        if trail and len(trail) <= 1 + len(self._drafted):
            chains = [(), *self._chains]
            for at, said in enumerate(trail[1:], start=1):
                for begin in range(len(chains[at])):
                    self._enter(_SAID, (*chains[at][begin:], said))
            # The next draft's guesses at these places are what was said there.
            ends = [
                ((*chain, said))[-_CHAIN + 1 :] for chain, said in zip(chains, trail, strict=False)
            ]
            self._chains, self._rest = ends[len(tokens) :], tuple(trail[len(tokens) :])
        else:
            self._chains, self._rest = [], ()
        known = self._recent + list(tokens)
        for at in range(len(known) - 1):
            self._enter(_KNOWN, tuple(known[at : at + _CHAIN]))
        self._recent = known[-_CHAIN:]

    def guess(self, count: int) -> Draft:
        """Followers of the last token, chain by chain; else what the last trail says."""
        guesses: list[int] = []
        kind, last = _ITERATED, self._recent[-1]
        while len(guesses) < count and last in self._entries:
            found, followers = self._entries[last]
            kind = kind or found
            guesses += followers
            last = followers[-1]
        guesses = guesses[:count]
        rest = self._rest[len(guesses) : count]
        tails = self._chains[len(guesses) : len(guesses) + len(rest)]
        known = [tuple(guesses[max(0, at - _CHAIN + 2) : at + 1]) for at in range(len(guesses))]
        self._chains = [*known, *tails]
        self._drafted = (*guesses, *rest)
        if not self._drafted:  # any guess begins the iteration
            self._drafted = tuple(self._recent[-count:])
            self._chains = [(token,) for token in self._drafted]
        return Draft(self._drafted, kind)

    def _enter(self, kind: int, chain: tuple[int, ...]) -> None:
        if len(chain) < 2:
            return
        first, *followers = chain
        entry = self._entries.pop(first, None)
        # What was given or said for sure is not replaced by what was said after a wrong guess,
        # unless it tells as much.
        if entry is None or kind >= entry[0] or len(followers) >= len(entry[1]):
            entry = (kind, tuple(followers))
        self._entries[first] = entry
        if len(self._entries) > _ENTRIES:
            del self._entries[next(iter(self._entries))]


class LookaheadProposer:
    """Owns a pool for each slot, made when guesses are first wanted of it."""

    free = True

    def __init__(self, most: int) -> None:
        self._most = most
        self._slots: dict[SlotId, Pool] = {}
        self._begun: dict[SlotId, list[int]] = {}

    def begin(self, plan: StepPlan, wanted: int) -> None:
        del wanted
        for slot in plan.freed:
            self._slots.pop(slot, None)
            self._begun.pop(slot, None)
        for admission in plan.admitted:
            self._begun[admission.slot] = list(admission.tokens)

    def take_in(self, seen: Sequence[Seen]) -> None:
        for each in seen:
            if each.slot in self._begun:
                self._begun[each.slot] += each.tokens
            else:
                self._slots[each.slot].take_in(each.tokens, each.trail)

    def propose(self, slots: Sequence[SlotId]) -> list[Draft]:
        for slot in slots:
            if slot in self._begun:
                self._slots[slot] = Pool(self._begun.pop(slot))
        return [self._slots[slot].guess(self._most) for slot in slots]


@dataclass(frozen=True, slots=True)
class LookaheadGuide:
    """Needs no weights and no pages."""

    most: int
    token_bytes: int = 0

    def start(self, made: Assembled) -> Proposer:
        del made
        return LookaheadProposer(self.most)

    def describe(self) -> str:
        return f"lookahead, up to {self.most} guesses, chains of up to {_CHAIN} tokens"


def guide(site: Site) -> LookaheadGuide:
    return LookaheadGuide(site.config.speculation.most_guesses)
