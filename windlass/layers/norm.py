"""RMSNorm, alone and fused with the residual's addition."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from windlass.kernels import reference


class RMSNorm(nn.Module):
    """Scales the last dimension to unit root mean square."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return reference.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream: (normalised sum, new residual)."""
        if residual is None:
            return self(x), x
        return reference.add_rms_norm(x, residual, self.weight, self.eps)
