"""How the runner of a pipeline stage gets hidden states, and passes them on.

Every stage has the plan, which gives the number of tokens, so only the residual stream is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from windlass.core.types import RowResult, StepPlan
from windlass.kernels.batch import StepBatch
from windlass.kernels.storages import Held
from windlass.parallel.mesh import PeerGroup, Sending, SingleRank
from windlass.runner.executor import CompletedSamples, Samples
from windlass.runner.grammar import Matchers
from windlass.runner.inputs import StepInputs


class Pipeline:
    """The place of a runner's network among the stages. Owns the hidden states that are being sent.

    Without arguments, one stage computes all layers and exchanges nothing.
    """

    def __init__(
        self,
        ranks: PeerGroup | None = None,
        *,
        layers: range = range(0),
        hidden_size: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        """`ranks`: one per stage, in order. `layers`: of this stage."""
        self._ranks = ranks or SingleRank()
        self._layers = layers
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._sent: deque[Sending] = deque()
        self.num_stages = self._ranks.size
        self.is_first = self._ranks.rank == 0
        self.is_last = self._ranks.rank == self.num_stages - 1

    def enter(self, ids: Tensor, aux_hidden_states: dict[int, Tensor]) -> Tensor:
        """The network's inputs: token ids on the first stage, else the residual stream.

        Sets the aux hidden states of layers of earlier stages, which a drafter on the last stage reads.
        """
        if self.is_first:
            return ids
        known = [layer for layer in aux_hidden_states if layer < self._layers.start]
        if not known:
            return self.receive(len(ids))
        x, *others = self.receive(len(ids), 1 + len(known))
        aux_hidden_states.update(zip(known, others, strict=True))
        return x

    def leave(self, x: Tensor, aux_hidden_states: dict[int, Tensor]) -> None:
        """Send what `enter` of the next stage reads."""
        known = [layer for layer in aux_hidden_states if layer < self._layers.stop]
        streams = [x, *(aux_hidden_states[layer] for layer in known)]
        self.send(torch.stack(streams) if known else x)

    def empty(self, num_tokens: int, *streams: int) -> Tensor:
        """A residual stream [tokens, hidden] without values, or several [streams, tokens, hidden]."""
        shape = (*streams, num_tokens, self._hidden_size)
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def receive(self, num_tokens: int, *streams: int) -> Tensor:
        """The residual stream of the stage before, in the order of the plans."""
        x = self.empty(num_tokens, *streams)
        self.receive_into(x)
        return x

    def receive_into(self, x: Tensor) -> None:
        """As `receive`, of the shape of `x`."""
        self._ranks.receive(x, self._ranks.rank - 1)

    def send(self, x: Tensor) -> None:
        """Send the residual stream to the next stage without waiting. The caller must not change `x`."""
        self._sent.append(self._ranks.send(x, self._ranks.rank + 1))
        # At most this many plans are in flight, so the oldest residual stream was sent.
        self.drain(self.num_stages)

    def drain(self, num_left: int = 0) -> None:
        """Wait until no more than `num_left` hidden states are being sent."""
        while len(self._sent) > num_left:
            self._sent.popleft().wait()


class NoSampling:
    """Sampling on a stage before the last: does nothing."""

    grammars: Matchers | None = None

    def storages(self) -> Iterator[Held]:
        return iter(())

    def apply(self, plan: StepPlan) -> None:
        del plan

    def finish(
        self, inputs: StepInputs, logits: Tensor, batch: StepBatch, indices: Tensor
    ) -> Samples:
        del inputs, logits, batch, indices
        return CompletedSamples(list[RowResult]())
