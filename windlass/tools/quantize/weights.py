"""Quantised weights, and round-to-nearest quantisation to integers, float8 and NF4.

Scales are rounded to the file's dtype, so `dequantise` returns what a reader of the file gets.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import torch
from torch import Tensor
from torch.nn.functional import pad

_FLOAT8 = torch.float8_e4m3fn
_MAX = torch.finfo(_FLOAT8).max
# Quantile of the outermost level, as in QLoRA.
_OFFSET = 0.9677083


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
        part = slice(first, first + count)
        return IntWeight(
            bits=self.bits,
            codes=self.codes[part],
            scales=self.scales[part],
            zeros=self.zeros[part],
            groups=self.groups,
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
    """Assign adjacent inputs to groups of one size."""
    return torch.arange(num_in, dtype=torch.int32, device=device) // group


@dataclass(frozen=True, slots=True)
class Grid:
    """An integer quantisation grid: bits, group size, symmetry, and the dtype of scales."""

    bits: int
    group: int  # inputs that share a scale
    symmetric: bool  # the zero point is in the middle; else the range fits the weights
    stored: torch.dtype = torch.float32  # dtype of scales in the file

    @property
    def top(self) -> int:
        return (1 << self.bits) - 1

    def fit(self, weight: Tensor, shrink: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
        """Return scale and zero point of the weights along the last dimension.

        `shrink` narrows the range and clips the outermost weights.
        """
        if self.symmetric:
            # 2 ** bits values around zero: one more below zero than above.
            scale = weight.abs().amax(-1) * shrink / (self.top / 2)
            zero = torch.full_like(scale, 1 << (self.bits - 1))
            return self._stored(scale), zero
        low = weight.amin(-1).clamp(max=0) * shrink
        high = weight.amax(-1).clamp(min=0) * shrink
        # GPTQ files store zero points minus one, so a zero point of 0 cannot be written.
        scale = self._stored(torch.maximum((high - low) / self.top, high / (self.top - 1)))
        return scale, (-low / scale).round().clamp(1, self.top)

    def _stored(self, scale: Tensor) -> Tensor:
        """Round to the file's dtype; groups of zeros get a scale of 1."""
        rounded = scale.to(self.stored).float()
        return torch.where(rounded > 0, rounded, torch.ones_like(rounded))

    def encode(self, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return (weight / scale + zero).round().clamp(0, self.top)


def round_to_nearest(weight: Tensor, grid: Grid, shrink: Tensor | None = None) -> IntWeight:
    """Quantise a weight [N, K]; `shrink` [N, K / group] narrows the range of each group."""
    num_out, num_in = weight.shape
    grouped = weight.unflatten(1, (-1, grid.group))
    scale, zero = grid.fit(grouped, 1.0 if shrink is None else shrink)
    codes = grid.encode(grouped, scale[..., None], zero[..., None])
    return IntWeight(
        bits=grid.bits,
        codes=codes.to(torch.uint8).view(num_out, num_in),
        scales=scale,
        zeros=zero.to(torch.uint8),
        groups=even_groups(num_in, grid.group, weight.device),
    )


def to_float8(weight: Tensor, stored: torch.dtype, block: int | None = None) -> Float8Weight:
    """Quantise with one scale per output, or per block x block tile; scales are rounded to `stored`."""
    if block is None:
        scales = _scale(weight.abs().amax(1, keepdim=True), stored)
        return Float8Weight(_encode(weight, scales), scales)
    num_out, num_in = weight.shape
    padded = pad(weight.abs(), (0, -num_in % block, 0, -num_out % block))
    tiles = padded.unflatten(0, (-1, block)).unflatten(2, (-1, block))
    scales = _scale(tiles.amax((1, 3)), stored)
    wide = scales.repeat_interleave(block, 0)[:num_out].repeat_interleave(block, 1)[:, :num_in]
    return Float8Weight(_encode(weight, wide), scales, block)


def quantise_activations_float8(x: Tensor, group: int | None = None) -> Tensor:
    """Quantise and dequantise activations: one scale per token, or per token and `group` features."""
    grouped = x if group is None else x.unflatten(-1, (-1, group))
    scale = (grouped.abs().amax(-1, keepdim=True) / _MAX).clamp(min=1e-12)
    return (_encode(grouped, scale).float() * scale).view_as(x)


def quantise_activations_int8(x: Tensor) -> Tensor:
    """Quantise and dequantise activations to int8 with one scale per token."""
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-12)
    return (x / scale).round().clamp(-128, 127) * scale


def _scale(largest: Tensor, stored: torch.dtype) -> Tensor:
    scale = (largest / _MAX).to(stored).float()
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def _encode(values: Tensor, scale: Tensor) -> Tensor:
    return (values / scale).clamp(-_MAX, _MAX).to(_FLOAT8)


@cache
def _levels() -> tuple[float, ...]:
    """Return eight levels above zero, zero, and seven below, scaled to [-1, 1]."""
    quantile = NormalDist().inv_cdf
    above = [quantile(0.5 + (_OFFSET - 0.5) * i / 8) for i in range(1, 9)]
    below = [-quantile(0.5 + (_OFFSET - 0.5) * i / 7) for i in range(1, 8)]
    largest = above[-1]
    return tuple(sorted(value / largest for value in [*above, 0.0, *below]))


def nf4_table() -> Tensor:
    """Return the NF4 codebook, float32 [16]."""
    return torch.tensor(_levels(), dtype=torch.float32)


def to_nf4(weight: Tensor, group: int) -> TableWeight:
    """Quantise each weight, divided by the absmax of its group, to the nearest level."""
    table = nf4_table().to(weight.device)
    grouped = weight.unflatten(1, (-1, group))
    scales = grouped.abs().amax(-1)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    borders = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize((grouped / scales[..., None]).contiguous(), borders)
    return TableWeight(codes.flatten(1).to(torch.uint8), table, scales)
