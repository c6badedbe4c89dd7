"""Quantised weights as the methods make them, before a layout packs them for a file.

Scales are already rounded to what the file will hold: what `dequantise` gives is what a reader gets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class IntWeight:
    """weight[n, k] = (codes[n, k] - zeros[n, g]) * scales[n, g], with g = groups[k]."""

    bits: int
    codes: Tensor  # uint8 [N, K], 0 to 2 ** bits - 1
    scales: Tensor  # float32 [N, G]
    zeros: Tensor  # uint8 [N, G]
    groups: Tensor  # int32 [K]: the group of each input

    def dequantise(self) -> Tensor:
        at = self.groups.long()
        zeros = self.zeros.float()[:, at]
        return (self.codes.float() - zeros) * self.scales[:, at]

    def rows(self, first: int, count: int) -> IntWeight:
        """Some of the outputs."""
        part = slice(first, first + count)
        return IntWeight(
            self.bits, self.codes[part], self.scales[part], self.zeros[part], self.groups
        )


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """weight = code * scale, one scale per output or per block of outputs and inputs."""

    codes: Tensor  # float8_e4m3fn [N, K]
    scales: Tensor  # float32 [N, 1] or [ceil(N / block), ceil(K / block)]
    block: int | None = None

    def dequantise(self) -> Tensor:
        return self.codes.float() * self._spread()

    def _spread(self) -> Tensor:
        if self.block is None:
            return self.scales
        num_out, num_in = self.codes.shape
        wide = self.scales.repeat_interleave(self.block, 0)[:num_out]
        return wide.repeat_interleave(self.block, 1)[:, :num_in]


@dataclass(frozen=True, slots=True)
class TableWeight:
    """weight[n, k] = table[codes[n, k]] * scales[n, k // group]."""

    codes: Tensor  # uint8 [N, K], 0 to 15
    table: Tensor  # float32 [16]
    scales: Tensor  # float32 [N, K / group]

    @property
    def group(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    def dequantise(self) -> Tensor:
        spread = self.scales.repeat_interleave(self.group, dim=1)
        return self.table[self.codes.long()] * spread


QuantisedWeight = IntWeight | Float8Weight | TableWeight


def even_groups(num_in: int, group: int, device: torch.device) -> Tensor:
    """Inputs in groups of neighbours, all of one size."""
    return torch.arange(num_in, dtype=torch.int32, device=device) // group
