"""Rotary positions: tables of cos and sin, made once for every position that can occur."""

from __future__ import annotations

import torch
from torch import Tensor


class Rotary:
    """Owns the tables. Looked up once a step, used by every layer."""

    def __init__(
        self, inv_freq: Tensor, scale: float, max_positions: int, device: torch.device
    ) -> None:
        position = torch.arange(max_positions, dtype=torch.float32, device="cpu")
        angle = torch.outer(position, inv_freq)
        self._cos = (angle.cos() * scale).to(device)
        self._sin = (angle.sin() * scale).to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of the given positions: [tokens, dim / 2] in float32."""
        return self._cos[positions], self._sin[positions]
