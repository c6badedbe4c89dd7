"""Adapters rounded to one byte: int8 codes, and a scale for each rank of a module.

Ranks are what a row of one matrix and a column of the other share, so one number scales both.
"""

from __future__ import annotations

from torch import Tensor

from windlass.lora.base import Low

_MOST = 127


def encode(low: Low) -> Low:
    """The nearest codes of a change, on the device where it is; a rank of zeros has scale 0."""
    down, of_down = _codes(low.down.float())
    up, of_up = _codes(low.up.float().T)
    return Low(down, up.T, of_down * of_up)


def _codes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of each row, and what they are to be multiplied by."""
    scales = rows.abs().amax(1) / _MOST
    steps = scales.where(scales > 0, 1.0)
    return (rows / steps[:, None]).round_().char(), scales
