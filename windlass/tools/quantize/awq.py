"""AWQ: input features that are large on average get finer steps, by scaling their weights up.

The scale goes into the weight's columns and its inverse into whatever makes the inputs, so that the
network computes the same (folding.py). How strong it should be is searched for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.tools.quantize.statistics import Inputs
from windlass.tools.quantize.weights import Grid, round_to_nearest

_STEPS = 20  # strengths from 0 (no scaling) to 1
_SMALLEST = 1e-4
_MOST_ROWS = 256  # outputs that the search looks at; all of them choose alike
_CLIPS = tuple(1.0 - 0.05 * step for step in range(11))  # how far a group's range is narrowed


@dataclass(frozen=True, slots=True)
class Found:
    """The best scale, how strong it is, and the outputs' relative error without and with it."""

    scale: Tensor  # one per feature of the producer
    strength: float
    error_before: float
    error: float


def search_scale(weight: Tensor, inputs: Inputs, grid: Grid, sources: Tensor) -> Found:
    """Try scales of growing strength; input k is made by the producer's feature sources[k].

    Strength 0 is among them, so that the result is no worse than rounding alone.
    """
    weight = weight[:: -(-weight.shape[0] // _MOST_ROWS)]
    sizes = inputs.mean_abs.new_zeros(int(sources.max()) + 1)
    sizes = sizes.scatter_reduce(0, sources, inputs.mean_abs, "amax").clamp(min=_SMALLEST)
    tried = []
    for step in range(_STEPS + 1):
        scale = sizes ** (step / _STEPS)
        scale = scale / (scale.max() * scale.min()).sqrt()
        wide = scale[sources]
        rounded = round_to_nearest(weight * wide, grid).dequantise() / wide
        tried.append((inputs.output_error(weight, rounded), step, scale))
    error, step, scale = min(tried, key=lambda one: one[:2])
    return Found(scale, step / _STEPS, tried[0][0], error)


def search_clip(weight: Tensor, inputs: Inputs, grid: Grid) -> Tensor:
    """For each output and group how far to narrow its range: [N, K / group].

    Judged by the part of the error that the group makes alone.
    """
    num_groups = weight.shape[1] // grid.group
    across = inputs.gram.unflatten(0, (num_groups, -1)).unflatten(2, (num_groups, -1))
    within = torch.stack([across[g, :, g] for g in range(num_groups)])  # [G, group, group]
    best_error = weight.new_full((weight.shape[0], num_groups), float("inf"))
    best = torch.ones_like(best_error)
    for clip in _CLIPS:
        shrink = torch.full_like(best, clip)
        lost = weight - round_to_nearest(weight, grid, shrink).dequantise()
        lost = lost.unflatten(1, (num_groups, -1))
        error = (torch.einsum("ngi,gij->ngj", lost, within) * lost).sum(-1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = torch.where(better, shrink, best)
    return best
