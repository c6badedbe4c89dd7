"""The interface of proposers. The runner verifies draft tokens; core/speculation decides how many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from windlass.config import EngineConfig, Limits
from windlass.core.card import Capacity
from windlass.core.types import Draft, Row, RowResult, SlotId, SlotInit, StepPlan
from windlass.measurement_cache import MeasurementCache
from windlass.models.hparams import HParams
from windlass.models.source import ModelFiles

if TYPE_CHECKING:
    from windlass.kernels.storages import Held
    from windlass.runner.assemble import Assembled, DrafterKV
    from windlass.runner.executor import PendingStep
    from windlass.runner.load import Loaded


class SlotUpdate(NamedTuple):
    """The tokens that a slot has gained, from the last step or from several steps without drafts.

    `drafts` are draft tokens that the runner made in the same step. `target_tokens` are the target
    model's samples after each draft token of the row, including rejected draft tokens. `verified`
    are those draft tokens, which may be another proposer's or a client's prediction.
    """

    slot: SlotId
    tokens: Sequence[int]
    drafts: tuple[int, ...] = ()
    target_tokens: tuple[int, ...] = ()
    verified: tuple[int, ...] = ()


def slot_update(row: Row, result: RowResult) -> SlotUpdate:
    """Build the proposer's update for a row that sampled."""
    return SlotUpdate(
        slot=row.slot,
        tokens=result.tokens,
        drafts=result.drafts,
        target_tokens=result.target_tokens,
        verified=row.tokens[-row.num_drafts :] if row.num_drafts else (),
    )


NO_DRAFT = Draft(())


class Submits(Protocol):
    """A runner, as far as proposers use it."""

    def submit(self, plan: StepPlan) -> PendingStep: ...

    def storages(self) -> Iterator[Held]: ...


class Proposer(Protocol):
    """Makes draft tokens. Owns its per-slot state."""

    # As in core/speculation/facts.py:ProposerTraits.
    free: bool
    in_step: bool  # `propose` only returns the drafts of the runner's step

    def admit(self, new: SlotInit) -> None:
        """Start tracking a slot; its request may have run without drafts for a while."""
        ...

    def forget(self, slot: SlotId) -> None:
        """Drop a freed slot; unknown slots are ignored."""
        ...

    def update(self, updates: Sequence[SlotUpdate]) -> None:
        """Append the tokens of slots since their last update: one step, or several without drafts."""
        ...

    def backlog(self, slot: SlotId) -> int:
        """Number of the slot's tokens, without the last, to compute before drafting."""
        ...

    def propose(self, slots: Sequence[SlotId], draft_length: int) -> list[Draft]:
        """Draft for each of these slots, after `update` was called for all of them.

        A free proposer may draft more tokens than `draft_length`.
        """
        ...

    def storages(self) -> Iterator[Held]:
        """All tensors that it holds, without those of the runner."""
        ...


def apply_plan(proposer: Proposer, plan: StepPlan) -> None:
    """Pass the plan's freed and admitted slots to the proposer."""
    for slot in plan.freed:
        proposer.forget(slot)
    for new in plan.admitted:
        proposer.admit(new)


@dataclass(frozen=True, slots=True)
class SpeculationContext:
    """The target model that a proposer is loaded for, before its KV cache and runner exist."""

    config: EngineConfig
    files: ModelFiles
    hparams: HParams
    loaded: Loaded
    cache: MeasurementCache  # measurements of earlier starts

    @property
    def limits(self) -> Limits:
        on_cuda = self.loaded.parts.device.type == "cuda"
        return self.config.limits("cuda" if on_cuda else "cpu")


class ProposerLoader(Protocol):
    """A chosen proposer with its weights loaded; `start` connects it to the runner."""

    token_bytes: int  # bytes that it needs per token beside the target's KV

    def start(self, made: Assembled) -> Proposer | None:
        """Make the proposer; None if measurements show that drafting is never profitable."""
        ...

    def describe(self) -> str:
        """Describe the proposer for the start-up table."""
        ...


@runtime_checkable
class DrafterLoader(Protocol):
    """A loader whose drafter fills KV pages of its own as the target computes: tiers save both.

    A draft model computes the tokens of a loaded prefix by itself, before it drafts (`backlog`).
    """

    def make_kv(self, capacity: Capacity) -> DrafterKV:
        """Allocate the KV cache that `start` finds in `made.drafter_kv`."""
        ...
