"""What is kept of a linear layer's inputs: their Gram matrix and their sizes, not the inputs.

The change of the outputs that a change of the weight makes follows from the Gram matrix exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of one linear layer over all calibration tokens, per feature."""

    gram: Tensor  # [K, K] mean of x x.T
    mean_abs: Tensor  # [K]
    max_abs: Tensor  # [K]

    def divided(self, scale: Tensor) -> Inputs:
        """As they are once each feature is divided by its scale."""
        gram = self.gram / scale[:, None] / scale[None, :]
        return Inputs(gram, self.mean_abs / scale, self.max_abs / scale)

    def output_error(self, weight: Tensor, changed: Tensor) -> float:
        """Mean squared change of the outputs, relative to their mean square."""
        return float(self._energy(weight - changed) / self._energy(weight).clamp(min=1e-30))

    def _energy(self, weight: Tensor) -> Tensor:
        return ((weight @ self.gram) * weight).sum()


class Gathering:
    """Adds up the inputs of one linear layer, batch by batch."""

    def __init__(self, num_in: int, device: torch.device) -> None:
        self._gram = torch.zeros(num_in, num_in, device=device)
        self._sum_abs = torch.zeros(num_in, device=device)
        self._max_abs = torch.zeros(num_in, device=device)
        self._count = 0

    def add(self, x: Tensor) -> None:
        """x: [tokens, K]"""
        self._gram.addmm_(x.T, x)
        sizes = x.abs()
        self._sum_abs += sizes.sum(0)
        self._max_abs = torch.maximum(self._max_abs, sizes.amax(0))
        self._count += x.shape[0]

    def done(self) -> Inputs:
        return Inputs(self._gram / self._count, self._sum_abs / self._count, self._max_abs)
