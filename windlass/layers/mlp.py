"""The gated feed-forward part of a block."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from windlass.kernels.ops import Ops
from windlass.layers.linear import Linear
from windlass.parallel.mesh import Group
from windlass.quant.base import LinearMethod


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        method: LinearMethod,
        ops: Ops,
        group: Group,
        bias: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.ops = ops
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = Linear(parts, hidden_size, method, group, bias=bias)
        self.down_proj = Linear(
            {"down_proj": hidden_size}, intermediate_size, method, group, shard="in", bias=bias
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_up_proj.gated(x, self.ops.silu_mul))
