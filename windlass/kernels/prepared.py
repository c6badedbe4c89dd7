"""A packed weight as one kernel wants it, and what may be asked of it beside the plain product."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from windlass.kernels.gemm import Norm
from windlass.kernels.rounded import Inputs, Outputs, Rounding


class Prepared(ABC):
    """Kernels override what they can do in fewer passes."""

    @property
    @abstractmethod
    def num_bytes(self) -> int: ...

    @property
    def coarse_prompts(self) -> bool:
        """Whether inputs of prompts are rounded more coarsely than others, where a step says which."""
        return False

    @abstractmethod
    def apply(self, x: Inputs) -> Tensor:
        """x [M, K] times the weight: [M, N] in x's type."""

    def rounding(self, num_rows: int) -> Rounding | None:
        """How so many rows of inputs should come; None: as they are. Tensors are taken always."""
        del num_rows
        return None

    def raw(self, x: Inputs) -> Outputs:
        """The product for a reader that multiplies the scales in."""
        return self.apply(x)

    def then(self, x: Inputs, residual: Tensor, norm: Norm) -> tuple[Inputs, Tensor]:
        """The product, into the residual stream and through a norm: (normalised, new residual)."""
        return norm.add(self.raw(x), residual)

    def gated(self, x: Inputs, silu_mul: Callable[[Outputs], Inputs]) -> Inputs:
        """silu(x @ gate.T) * (x @ up.T), where the weight is gate above up."""
        return silu_mul(self.raw(x))


class RowReader(Prepared):
    """One whose rows can be read by themselves: an embedding's table."""

    @abstractmethod
    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the weight, dequantised: [ids, K]."""
