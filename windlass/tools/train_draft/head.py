"""The interface of a head under training, and helpers of both kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from windlass.tools.train_draft.batches import Batch
from windlass.tools.train_draft.target import States

DECAY = 0.8  # of the loss weight per draft position


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The loss of one step and the accuracy per draft position, on the device."""

    loss: Tensor  # []
    accuracy: Tensor  # [draft tokens]: share that equals the target's argmax


class Head(Protocol):
    """A module under training, and its files."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def num_draft_tokens(self) -> int: ...

    def backward(self, batch: Batch, states: States) -> StepMetrics:
        """Add a batch's gradients to those of the module."""
        ...

    def draft(self, batch: Batch, states: States) -> list[Tensor]:
        """Per draft position j, the draft tokens at `batch.roots(j)`."""
        ...

    def config(self) -> dict[str, Any]:
        """The contents of config.json, in the public layout."""
        ...


def soft_loss(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Cross entropy with the target's distribution, a weighted sum over rows.

    Labels may sum to less than one: tokens outside the draft vocabulary cannot be learned.
    """
    return F.cross_entropy(logits.float(), labels, reduction="none") @ weights


def autocast(device: torch.device) -> torch.autocast:
    """Autocast to bfloat16 on CUDA; float32 on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def to_module_dtype(x: Tensor) -> Tensor:
    """Convert a module's inputs: autocast takes any dtype; without it they must be float32."""
    return x if x.device.type == "cuda" else x.float()


def saved_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The state dict to save: floats as bfloat16, integers unchanged."""
    return {
        name: (value.bfloat16() if value.is_floating_point() else value).detach().cpu().contiguous()
        for name, value in module.state_dict().items()
    }
