"""Weights and activations in 8-bit floats (e4m3): 4 exponent bits, 3 of mantissa, up to 448."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from windlass.tools.quantize.weights import Float8Weight

_FORMAT = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FORMAT).max


def to_float8(weight: Tensor, stored: torch.dtype, block: int | None = None) -> Float8Weight:
    """One scale per output, or per block x block of outputs and inputs, rounded to `stored`."""
    if block is None:
        scales = _scale(weight.abs().amax(1, keepdim=True), stored)
        return Float8Weight(_encode(weight, scales), scales)
    num_out, num_in = weight.shape
    padded = pad(weight.abs(), (0, -num_in % block, 0, -num_out % block))
    tiles = padded.unflatten(0, (-1, block)).unflatten(2, (-1, block))
    scales = _scale(tiles.amax((1, 3)), stored)
    wide = scales.repeat_interleave(block, 0)[:num_out].repeat_interleave(block, 1)[:, :num_in]
    return Float8Weight(_encode(weight, wide), scales, block)


def round_activations_float8(x: Tensor, group: int | None = None) -> Tensor:
    """As a kernel sees them: one scale per token, or per token and `group` features."""
    parts = x if group is None else x.unflatten(-1, (-1, group))
    scale = (parts.abs().amax(-1, keepdim=True) / _LARGEST).clamp(min=1e-12)
    return (_encode(parts, scale).float() * scale).view_as(x)


def round_activations_int8(x: Tensor) -> Tensor:
    """As a kernel sees them: whole numbers to 127, one scale per token."""
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-12)
    return (x / scale).round().clamp(-128, 127) * scale


def _scale(largest: Tensor, stored: torch.dtype) -> Tensor:
    scale = (largest / _LARGEST).to(stored).float()
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def _encode(values: Tensor, scale: Tensor) -> Tensor:
    return (values / scale).clamp(-_LARGEST, _LARGEST).to(_FORMAT)
