"""The interface of drafters that read a step's hidden states on its device: Medusa, EAGLE, MTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from windlass.kernels.batch import StepBatch
from windlass.kernels.storages import Held


@dataclass(frozen=True, slots=True)
class DrafterInputs:
    """A finished step on the device, as a drafter reads it."""

    hidden: Tensor  # [sampled tokens, or all; hidden size]: input of the LM head
    read: Tensor  # [rows]: index into `hidden` of each row's last accepted token
    # By layer: its input residual stream; under the number of layers: the LM head's input.
    aux_hidden_states: dict[int, Tensor]
    following: (
        Tensor  # [tokens]: the token after each position; undefined after a rejected draft token
    )
    last: Tensor  # [rows]: index of each row's last accepted token
    batch: StepBatch
    decode_batch: Callable[[Tensor, Tensor], StepBatch]  # of one token per row: positions, slots


class Drafter(Protocol):
    """Owns its weights and its KV pages, which use the target's block ids."""

    layers: tuple[int, ...]  # keys of the aux hidden states that it reads
    num_siblings: int  # alternatives to the first draft token that it can make

    def draft(self, inputs: DrafterInputs, count: int, siblings: int = 0) -> Tensor:
        """Draft tokens [rows, count + siblings], int32, that follow each row's newest token.

        The last `siblings` (0 or `num_siblings`) columns are alternatives to the first draft token.
        """
        ...

    def storages(self) -> Iterator[Held]:
        """Its weights and its KV pages."""
        ...

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks: (source, destination) pairs."""
        ...
