"""Facts about speculation for the scheduler: plain values, measured at start."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.core.speculation.costs import Costs


@dataclass(frozen=True, slots=True)
class ProposerTraits:
    """How a proposer makes drafts."""

    # Drafting costs next to nothing. A free proposer drafts after every step, and the next step
    # waits for it only when it found a draft.
    free: bool
    in_step: bool  # the runner's step makes the drafts

    @property
    def computes(self) -> bool:
        """Whether it computes tokens of its own, outside the runner's steps."""
        return not (self.free or self.in_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationFacts:
    """The proposer, its measured costs, and the limits of the runner."""

    proposer: ProposerTraits
    costs: Costs
    max_positions_per_step: int
    max_draft_tokens: int
    max_drafts_per_row: tuple[int, ...]  # by number of rows
