"""Rotary embeddings (RoPE): a cos and sin table for every position."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Owns the float32 table [positions, cos then sin] that all layers share."""

    cos_sin: Tensor

    def __init__(
        self, inv_freq: Tensor, scale: float, max_positions: int, device: torch.device
    ) -> None:
        super().__init__()
        position = torch.arange(max_positions, dtype=torch.float32, device="cpu")
        angle = torch.outer(position, inv_freq)
        table = torch.cat([angle.cos() * scale, angle.sin() * scale], dim=-1).to(device)
        self.register_buffer("cos_sin", table, persistent=False)
