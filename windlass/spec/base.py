"""What a way to guess has to offer. Verification is the runner's, and how many pay is governor.py's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from windlass.core.types import SlotId


class Seen(NamedTuple):
    """What became known of one slot in the last step: tokens that nothing can take back."""

    slot: SlotId
    tokens: Sequence[int]


class Draft(NamedTuple):
    """Guesses for the positions after the last known token, in their order.

    `kind` is the proposer's own notion of how sure it is: acceptance is counted by it.
    """

    tokens: tuple[int, ...]
    kind: int = 0


NO_DRAFT = Draft(())


class Proposer(Protocol):
    """Owns what it remembers of each slot."""

    lookahead: int  # KV positions that it may write past the last token
    wants: tuple[int, ...]  # layers whose hidden states it reads

    def admit(self, slot: SlotId, tokens: Sequence[int]) -> None:
        """A request got this slot, with these tokens known."""
        ...

    def forget(self, slot: SlotId) -> None: ...

    def propose(self, seen: Sequence[Seen]) -> list[Draft]:
        """Take in what is new, and guess what follows it: one draft for each, perhaps empty."""
        ...
