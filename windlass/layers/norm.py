"""RMSNorm, alone and fused with the residual's addition."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from windlass.kernels.ops import Ops


class RMSNorm(nn.Module):
    """Scales the last dimension to unit root mean square."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, ops: Ops) -> None:
        super().__init__()
        self.eps = eps
        self.ops = ops
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream, which may be changed: (normalised sum, new residual)."""
        if residual is None:
            return self.ops.rms_norm(x, self.weight, self.eps), x
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)


class HeadNorm(nn.Module):
    """The weight of a norm over each head; it is applied where the heads are rotated."""

    def __init__(self, dim: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim, dtype=dtype), requires_grad=False)
