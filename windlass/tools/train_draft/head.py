"""What the trainer asks of a head that it trains, whatever its kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from windlass.tools.train_draft.batches import Batch
from windlass.tools.train_draft.target import States

DECAY = 0.8  # of the weight of each further guess


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one step, still on the device: the loss, and how often each guess was the target's."""

    loss: Tensor  # []
    right: Tensor  # [guesses], shares


class Head(Protocol):
    """A module under training, and what is written of it."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def num_draft_tokens(self) -> int: ...

    def learn(self, batch: Batch, states: States) -> Figures:
        """Add a batch's gradients to the module's."""
        ...

    def guess(self, batch: Batch, states: States) -> list[Tensor]:
        """Per guess j, the tokens guessed at `batch.roots(j)`."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """What model.safetensors holds."""
        ...

    def config(self) -> dict[str, Any]:
        """What config.json says, in the public layout."""
        ...


def soft_loss(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Cross entropy with the target's own distribution, a weighted sum over rows.

    Labels may sum to less than one: what lies outside of a draft vocabulary cannot be learnt.
    """
    return F.cross_entropy(logits.float(), labels, reduction="none") @ weights


def arithmetic(device: torch.device) -> torch.autocast:
    """bfloat16 on CUDA, float32 on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def as_inputs(x: Tensor) -> Tensor:
    """What a module reads: autocast takes any type; without it all must be float32."""
    return x if x.device.type == "cuda" else x.float()


def stored(module: nn.Module) -> dict[str, Tensor]:
    """A state dict as it is written: bfloat16, whole numbers as they are."""
    return {
        name: (value.bfloat16() if value.is_floating_point() else value).detach().cpu().contiguous()
        for name, value in module.state_dict().items()
    }
