"""Round to nearest: the grid of each group from its smallest and largest weight, nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.tools.quantize.weights import IntWeight, even_groups


@dataclass(frozen=True, slots=True)
class Grid:
    """Which whole numbers stand for weights: bits, groups of inputs, and how scales are stored."""

    bits: int
    group: int  # inputs that share a scale
    symmetric: bool  # the zero point is the middle; else the range follows the weights
    stored: torch.dtype = torch.float32  # the file's type of scales

    @property
    def top(self) -> int:
        return (1 << self.bits) - 1

    def fit(self, weight: Tensor, shrink: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
        """Scale and zero point for the weights along the last dimension, which is dropped.

        `shrink` narrows the range, so that the outermost weights are cut off.
        """
        if self.symmetric:
            # 2 ** bits values around zero: one more below than above.
            scale = weight.abs().amax(-1) * shrink / (self.top / 2)
            zero = torch.full_like(scale, 1 << (self.bits - 1))
            return self._stored(scale), zero
        low = weight.amin(-1).clamp(max=0) * shrink
        high = weight.amax(-1).clamp(min=0) * shrink
        # A zero point of 0 cannot be written in GPTQ's files, which store one less.
        scale = self._stored(torch.maximum((high - low) / self.top, high / (self.top - 1)))
        return scale, (-low / scale).round().clamp(1, self.top)

    def _stored(self, scale: Tensor) -> Tensor:
        """As the file will hold it; weights that are all zero get a scale that divides."""
        rounded = scale.to(self.stored).float()
        return torch.where(rounded > 0, rounded, torch.ones_like(rounded))

    def encode(self, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return (weight / scale + zero).round().clamp(0, self.top)


def round_to_nearest(weight: Tensor, grid: Grid, shrink: Tensor | None = None) -> IntWeight:
    """Quantise [N, K]; `shrink` [N, K / group] narrows the range of each group."""
    num_out, num_in = weight.shape
    grouped = weight.unflatten(1, (-1, grid.group))
    scale, zero = grid.fit(grouped, 1.0 if shrink is None else shrink)
    codes = grid.encode(grouped, scale[..., None], zero[..., None])
    return IntWeight(
        grid.bits,
        codes.to(torch.uint8).view(num_out, num_in),
        scale,
        zero.to(torch.uint8),
        even_groups(num_in, grid.group, weight.device),
    )
