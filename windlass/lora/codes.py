"""Adapters rounded to one byte: int8 codes, and a scale for each rank of a module.

Ranks are what a row of one matrix and a column of the other share, so one number scales both.
This is the definition; adapters that are read get the same codes from packing.py, much sooner.
"""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.lora.base import Low

MOST = 127


def encode(low: Low) -> Low:
    """The nearest codes of a change, on the device where it is; a rank of zeros has scale 0."""
    down, of_down = _codes(low.down, along=1)
    up, of_up = _codes(low.up, along=0)
    return Low(down, up, of_down * of_up)


def _codes(matrix: Tensor, along: int) -> tuple[Tensor, Tensor]:
    """Codes of a matrix, and what those of each rank are to be multiplied by."""
    values = matrix.to(torch.float32, copy=True)
    scales = values.abs().amax(along) / MOST
    steps = scales.where(scales > 0, 1.0)
    return values.div_(steps.unsqueeze(along)).round_().char(), scales
