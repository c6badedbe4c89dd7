"""Interface of a weight that is prepared for one kernel: the GEMM and its fused variants."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from windlass.kernels.gemm import Norm
from windlass.kernels.gemm_io import InputQuant, Inputs, Outputs
from windlass.kernels.storages import Held, held


class Prepared(ABC):
    """A prepared weight. Kernels override the variants that they can fuse."""

    @abstractmethod
    def tensors(self) -> Sequence[Tensor | None]:
        """The tensors of the weight."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors() if tensor is not None)

    def storages(self) -> Iterator[Held]:
        """The weight, and the workspace of its kernel."""
        return held("weights", *self.tensors())

    @property
    def lacks(self) -> str | None:
        """Which variants of the kernel this GPU cannot run, and why; None: it runs all."""
        return None

    @property
    def coarse_prompts(self) -> bool:
        """Whether activations of prompt tokens are quantised more coarsely than others."""
        return False

    @abstractmethod
    def apply(self, x: Inputs) -> Tensor:
        """x @ weight.T for x [M, K]: [M, N] in the dtype of x."""

    def input_quant(self, num_rows: int) -> InputQuant | None:
        """How `num_rows` rows of inputs should be quantised; None: not at all.

        `apply` also accepts unquantised tensors.
        """
        del num_rows
        return None

    def raw(self, x: Inputs) -> Outputs:
        """The GEMM for a reader that applies the scales of `UnscaledOutputs`."""
        return self.apply(x)

    def then(self, x: Inputs, residual: Tensor, norm: Norm) -> tuple[Inputs, Tensor]:
        """GEMM, residual addition and norm: (normalised, new residual)."""
        return norm.add(self.raw(x), residual)

    def gated(self, x: Inputs, silu_mul: Callable[[Outputs], Inputs]) -> Inputs:
        """silu(x @ gate.T) * (x @ up.T), where the weight's rows are gate, then up."""
        return silu_mul(self.raw(x))


class RowReader(Prepared):
    """A prepared weight whose rows can be read separately, as an embedding needs."""

    @abstractmethod
    def rows(self, ids: Tensor, dtype: torch.dtype, first: int | None = None) -> Tensor:
        """Dequantised rows of the weight: [ids, K]. `first`: as in reference.embedding."""
