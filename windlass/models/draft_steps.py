"""The operations between the GEMMs of a head that drafts token by token (EAGLE, MTP)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from windlass.kernels.batch import StepBatch
from windlass.kernels.storages import Held
from windlass.layers.norm import RMSNorm
from windlass.models.network import Network

if TYPE_CHECKING:
    from windlass.kernels.triton.eagle import FusedSteps


class DraftHead(Protocol):
    """A layer that predicts from the next token's embedding and a hidden state."""

    def fuse_aux_hidden_states(self, aux_hidden_states: Sequence[Tensor]) -> Tensor:
        """One hidden state per position, from those of the target's layers that the head reads."""
        ...

    def __call__(self, both: Tensor, hidden: Tensor, batch: StepBatch) -> tuple[Tensor, Tensor]:
        """Return (input of the LM head, hidden state for the next draft token).

        `both`: the next token's embedding and the hidden state, each normalised, concatenated.
        """
        ...

    def logits(self, normed: Tensor, network: Network) -> Tensor:
        """Logits over the draft vocabulary, from the head's own LM head or the target's."""
        ...

    def steps(self, network: Network) -> PlainSteps | FusedSteps: ...

    def storages(self) -> Iterator[Held]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSteps:
    """The operations, unfused: the reference implementation of FusedSteps."""

    network: Network
    norm: RMSNorm  # of embeddings
    hidden_norm: RMSNorm
    d2t: Tensor  # [draft vocabulary]: token id minus draft id
    max_positions: int

    def inputs(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """The layer's input: embeddings of the next tokens and the hidden states, normalised."""
        return torch.cat((self.norm(self.network.embed(ids)), self.hidden_norm(hidden)), dim=-1)

    def select(
        self, indices: Tensor, normed: Tensor, hidden: Tensor, positions: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Select the tokens from which drafting continues."""
        return normed[indices], hidden[indices], positions[indices], slots[indices]

    def advance(
        self, logits: Tensor, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The most likely tokens, their positions, and the layer's input for the next draft step."""
        best = logits.argmax(-1)
        tokens = (best + self.d2t[best]).to(torch.int32)
        positions = (positions + 1).clamp(max=self.max_positions - 1)
        return tokens, positions, self.inputs(tokens, hidden)


def steps_of(
    network: Network, *, norm: RMSNorm, hidden_norm: RMSNorm, d2t: Tensor, max_positions: int
) -> PlainSteps | FusedSteps:
    """Fused steps if the head uses Triton kernels and the embedding table is not packed."""
    table = network.table
    if not norm.ops.is_triton or table is None:
        return PlainSteps(
            network=network,
            norm=norm,
            hidden_norm=hidden_norm,
            d2t=d2t,
            max_positions=max_positions,
        )
    from windlass.kernels.triton.eagle import FusedSteps

    return FusedSteps(
        table=table,
        gains=norm.weight,
        hidden_gains=hidden_norm.weight,
        eps=norm.eps,
        offsets=d2t,
        max_positions=max_positions,
    )
