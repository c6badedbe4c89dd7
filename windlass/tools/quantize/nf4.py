"""NF4: sixteen levels at the quantiles of a normal distribution, one scale per block of inputs."""

from __future__ import annotations

from functools import cache
from statistics import NormalDist

import torch
from torch import Tensor

from windlass.tools.quantize.weights import TableWeight

# The share of the distribution below the outermost level; with it the levels are QLoRA's.
_OFFSET = 0.9677083


@cache
def _levels() -> tuple[float, ...]:
    """Eight levels above zero, zero, seven below; scaled to reach from -1 to 1."""
    quantile = NormalDist().inv_cdf
    above = [quantile(0.5 + (_OFFSET - 0.5) * i / 8) for i in range(1, 9)]
    below = [-quantile(0.5 + (_OFFSET - 0.5) * i / 7) for i in range(1, 8)]
    largest = above[-1]
    return tuple(sorted(value / largest for value in [*above, 0.0, *below]))


def nf4_table() -> Tensor:
    """The levels, float32 [16]."""
    return torch.tensor(_levels(), dtype=torch.float32)


def to_nf4(weight: Tensor, group: int) -> TableWeight:
    """The nearest level of each weight over the largest of its group."""
    table = nf4_table().to(weight.device)
    grouped = weight.unflatten(1, (-1, group))
    scales = grouped.abs().amax(-1)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    borders = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize((grouped / scales[..., None]).contiguous(), borders)
    return TableWeight(codes.flatten(1).to(torch.uint8), table, scales)
