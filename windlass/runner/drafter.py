"""Guesses made from a step's own hidden states, on its device: what heads behind a network do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from windlass.kernels.batch import StepBatch


@dataclass(frozen=True, slots=True)
class DrafterInputs:
    """A step as it lies on its device, with what is known after it."""

    hidden: Tensor  # [tokens that were asked for, or all; hidden], as the head reads them
    read: Tensor  # [rows] where in `hidden` that of `last` is
    aux_hidden_states: dict[int, Tensor]  # by layer: the residual stream that entered it
    following: Tensor  # [tokens] the token after each; after a wrong guess, anything
    last: Tensor  # [rows] the place of the last token that each row keeps
    batch: StepBatch
    alone: Callable[[Tensor, Tensor], StepBatch]  # one token a row, from positions and slots


class Drafter(Protocol):
    """Owns its weights, and pages under the same block ids as the network's."""

    layers: tuple[int, ...]  # whose inputs it reads
    num_siblings: int  # alternatives to its first guess that it can give

    def draft(self, found: DrafterInputs, count: int, siblings: int = 0) -> Tensor:
        """Guesses [rows, count + others], int32, for the positions after the token that follows `last`.

        The last `siblings` are alternatives to the first, 0 or as many as it can give.
        """
        ...

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, as in the network's own pages."""
        ...
