"""What a way to guess has to offer. Verification is the runner's, and how many pay is governor.py's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from windlass.config import EngineConfig, Limits
from windlass.core.types import Row, RowResult, SlotId, SlotInit, StepPlan
from windlass.models.hparams import HParams
from windlass.models.source import ModelFiles
from windlass.speculative.notes import Notes

if TYPE_CHECKING:
    from windlass.runner.assemble import Assembled, Loaded


class Seen(NamedTuple):
    """What became known of one slot in the last step: tokens that nothing can take back.

    `drafts` are guesses that the runner made itself, in the same step; `target_tokens` is what the model
    said after each of the guesses that the row carried, also after wrong ones.
    """

    slot: SlotId
    tokens: Sequence[int]
    drafts: tuple[int, ...] = ()
    target_tokens: tuple[int, ...] = ()


def seen(row: Row, result: RowResult) -> Seen:
    """What a row that sampled tells the proposer."""
    return Seen(row.slot, result.tokens, result.drafts, result.target_tokens)


class Draft(NamedTuple):
    """Guesses for the positions after the last known token, in their order.

    `kind` is the proposer's own notion of how sure it is: acceptance is counted by it.
    """

    tokens: tuple[int, ...]
    kind: int = 0
    begun: bool = False  # whether all of them are being verified already


NO_DRAFT = Draft(())


class Proposer(Protocol):
    """Owns what it remembers of each slot."""

    # Whether to guess costs next to nothing. Then it is tried after every step, and only where
    # it found something does the next step wait for it.
    free: bool
    in_step: bool  # whether drafts are part of the runner's step, and `propose` only hands them on

    def admit(self, new: SlotInit) -> None:
        """A request has a slot now, or has had one for a while without anybody guessing for it."""
        ...

    def forget(self, slot: SlotId) -> None:
        """A slot is free, if anybody had it."""
        ...

    def begin(self, wanted: int) -> None:
        """A step is about to run, after which so many guesses of each row are wanted; 0: none, and
        `propose` is not called. Nor is this for steps that follow and want none either.
        """
        ...

    def take_in(self, seen: Sequence[Seen]) -> None:
        """What slots got since they were last told of: in a step, or in several without guesses."""
        ...

    def backlog(self, slot: SlotId, num_tokens: int) -> int:
        """How many of a slot's tokens it would compute before it drafts, beyond the latest."""
        ...

    def propose(self, slots: Sequence[SlotId]) -> list[Draft]:
        """What follows in each of these slots, which were all seen a moment ago."""
        ...


def tell(proposer: Proposer, plan: StepPlan) -> None:
    """Who comes and goes with a step."""
    for slot in plan.freed:
        proposer.forget(slot)
    for new in plan.admitted:
        proposer.admit(new)


@dataclass(frozen=True, slots=True)
class SpeculationContext:
    """Where a proposer is to work: for whom it guesses, before there are pages and a runner."""

    config: EngineConfig
    files: ModelFiles
    hparams: HParams
    loaded: Loaded
    notes: Notes = field(default_factory=Notes)  # what was measured before

    @property
    def limits(self) -> Limits:
        on_cuda = self.loaded.parts.device.type == "cuda"
        return self.config.limits("cuda" if on_cuda else "cpu")


class ProposerLoader(Protocol):
    """A proposer that was chosen, with its weights in place; `start` is told of the runner."""

    token_bytes: int  # that it needs beside each token's KV in the pages

    def start(self, made: Assembled) -> Proposer | None:
        """None: it was found out that guesses would never pay."""
        ...

    def describe(self) -> str:
        """For the start-up table: what guesses, and with what."""
        ...
