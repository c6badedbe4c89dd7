"""int8 quantisation of LoRA weights, with one scale per rank of a module.

A rank is a row of `down` and a column of `up`, so one scale covers both. This file is the reference
implementation; adapters read from files get the same codes from the faster packing.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.lora.base import LoraWeights

MAX_CODE = 127


def quantise(weights: LoraWeights) -> LoraWeights:
    """Quantise to the nearest int8 codes, on the weights' device. A rank of zeros has scale 0."""
    down, down_scales = _quantise(weights.down, dim=1)
    up, up_scales = _quantise(weights.up, dim=0)
    return LoraWeights(down, up, down_scales * up_scales)


def _quantise(matrix: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """int8 codes of a matrix, and the scale of each rank."""
    values = matrix.to(torch.float32, copy=True)
    scales = values.abs().amax(dim) / MAX_CODE
    divisors = scales.where(scales > 0, 1.0)
    return values.div_(divisors.unsqueeze(dim)).round_().char(), scales
