"""Prompt lookup: the text that followed the same few tokens before, in the prompt or the output.

Costs a dictionary entry per token and touches no tensor. Where the output repeats what it
was given (editing, summarising, code), most guesses are right; elsewhere there are few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from windlass.core.types import SlotId, SlotInit
from windlass.speculative.base import NO_DRAFT, Draft, Proposer, Seen, SpeculationContext

if TYPE_CHECKING:
    from windlass.runner.assemble import Assembled


_MOST_LOOKED_AT = 64  # earlier places of the same tokens, the latest first


class Index:
    """The tokens of one request, and where each of their shortest n-grams was followed by something."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}  # by n-gram: the place of its follower
        self._earlier: list[int] = []  # by place of a follower: the one before; 0: there is none

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens. An n-gram is entered when its follower is known, so none finds itself."""
        own, latest, length = self._tokens, self._latest, self._shortest
        for place, token in enumerate(tokens, start=len(own)):
            gram = tuple(own[-length:])
            self._earlier.append(latest.get(gram, 0))
            if place >= length:
                latest[gram] = place
            own.append(token)

    def guess(self, count: int) -> Draft:
        """What followed the latest earlier occurrence of the longest n-gram at the end."""
        place = self._latest.get(tuple(self._tokens[-self._shortest :]), 0)
        best, most = 0, 0
        for _ in range(_MOST_LOOKED_AT):
            if not place:
                break
            alike = self._alike(place)
            if alike > most:
                best, most = place, alike
            if most == self._longest:
                break
            place = self._earlier[place]
        return Draft(self._copy(best, count), kind=most) if most else NO_DRAFT

    def _alike(self, place: int) -> int:
        """Tokens before a place that are the same as the last ones."""
        own, count = self._tokens, self._shortest
        most = min(self._longest, place)
        while count < most and own[place - count - 1] == own[-count - 1]:
            count += 1
        return count

    def _copy(self, at: int, count: int) -> tuple[int, ...]:
        """`count` tokens from `at` on; past the end the guesses themselves are what follows."""
        found = self._tokens[at : at + count]
        period = len(self._tokens) - at
        while len(found) < count:
            found.append(found[len(found) - period])
        return tuple(found)


class NgramProposer:
    """Owns an index for each slot, made of its tokens when guesses are first wanted of it."""

    free = True
    in_step = False

    def __init__(self, shortest: int, longest: int, most: int) -> None:
        """N-grams of `longest` down to `shortest` tokens; at most `most` guesses."""
        self._lengths = (shortest, longest)
        self._most = most
        self._slots: dict[SlotId, Index] = {}
        self._unread: dict[SlotId, list[int]] = {}

    def admit(self, new: SlotInit) -> None:
        self._slots[new.slot] = Index(*self._lengths)
        self._unread[new.slot] = list(new.tokens)

    def forget(self, slot: SlotId) -> None:
        self._slots.pop(slot, None)
        self._unread.pop(slot, None)

    def begin(self, wanted: int) -> None:
        """How many is the governor's business."""

    def take_in(self, seen: Sequence[Seen]) -> None:
        unread = self._unread
        for each in seen:
            unread[each.slot] += each.tokens

    def backlog(self, slot: SlotId, num_tokens: int) -> int:
        del slot, num_tokens
        return 0

    def propose(self, slots: Sequence[SlotId]) -> list[Draft]:
        drafts = []
        for slot in slots:
            index, unread = self._slots[slot], self._unread[slot]
            index.extend(unread)
            unread.clear()
            drafts.append(index.guess(self._most))
        return drafts


@dataclass(frozen=True, slots=True)
class NgramLoader:
    """Needs no weights and no pages."""

    shortest: int
    longest: int
    most: int
    token_bytes: int = 0

    def start(self, made: Assembled) -> Proposer:
        del made
        return NgramProposer(self.shortest, self.longest, self.most)

    def describe(self) -> str:
        return f"ngram, up to {self.most} guesses, {self.shortest} to {self.longest} tokens alike"


def open_loader(context: SpeculationContext) -> NgramLoader:
    wish = context.config.speculation
    return NgramLoader(wish.spec_ngram_min, wish.spec_ngram_max, wish.max_draft_tokens)
