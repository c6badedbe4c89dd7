"""GEMMs with 16- and 32-bit weights through torch, for any device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from windlass.kernels.gemm_io import InputQuant, Inputs, Outputs
from windlass.kernels.storages import Held

# Rows per batch-invariant GEMM. BLAS libraries choose how to split the sums by the number of rows.
_INVARIANT_ROWS = 16

# Runs a GEMM together with side work: (inputs, function that runs the GEMM) -> outputs of both.
OverlappedGemm = Callable[[Tensor, Callable[[], Tensor]], Tensor]


class Norm(Protocol):
    """The norm after a GEMM."""

    @property
    def fusable(self) -> bool:
        """Whether it is an RMS norm of the sum, which kernels may compute from `weight` and `eps`."""
        ...

    @property
    def weight(self) -> Tensor: ...

    @property
    def eps(self) -> float: ...

    def input_quant(self, num_rows: int) -> InputQuant | None:
        """How the reader of the result wants `num_rows` rows quantised; None: not at all."""
        ...

    def defers(self, num_rows: int) -> bool:
        """Whether the reader of the result takes `UnnormalisedInputs` of `num_rows` rows."""
        ...

    def add(
        self, x: Outputs, residual: Tensor | None, unquantised: bool = False
    ) -> tuple[Inputs, Tensor]:
        """(normalised x + residual, x + residual); with `unquantised` the result is a tensor."""
        ...


class TorchGemm:
    """GEMMs by torch and its BLAS library.

    Each engine has its own instance, also where engines share weights: a step sets the modes
    `batch_invariant` and `overlapped` for all GEMMs of its engine, which computes in one thread.
    """

    def __init__(self) -> None:
        self._batch_invariant = False
        self._overlapped = False

    def twin(self) -> TorchGemm:
        """An instance for another engine with the same weights: own modes, the same choices."""
        return TorchGemm()

    def storages(self) -> Iterator[Held]:
        """The workspace."""
        return iter(())

    def takes_unnormalised(self, weight: Tensor, num_rows: int) -> bool:
        """Whether `linear` and `gated` of this weight take `UnnormalisedInputs` of `num_rows` rows."""
        del weight, num_rows
        return False

    def linear(self, x: Inputs, weight: Tensor) -> Tensor:
        """x @ weight.T"""
        assert isinstance(x, Tensor)
        return batch_invariant_linear(x, weight) if self._batch_invariant else linear(x, weight)

    def gated(self, x: Inputs, weight: Tensor, silu_mul: Callable[[Outputs], Inputs]) -> Inputs:
        """silu(x @ gate.T) * (x @ up.T), where the rows of weight are gate, then up."""
        return silu_mul(self.linear(x, weight))

    def linear_norm(
        self, x: Inputs, weight: Tensor, residual: Tensor, norm: Norm
    ) -> tuple[Inputs, Tensor]:
        """x @ weight.T, residual addition and norm: (normalised sum, sum)."""
        return norm.add(self.linear(x, weight), residual)

    @property
    def is_batch_invariant(self) -> bool:
        """Whether the current step is batch-invariant."""
        return self._batch_invariant

    def batch_invariant(self, batch_invariant: bool = True) -> AbstractContextManager[None]:
        """Within the context, a row's result does not depend on the other rows."""
        return self._temporarily("_batch_invariant", batch_invariant)

    def overlapped(self, overlapped: bool = True) -> AbstractContextManager[None]:
        """Within the context, side work runs concurrently with every GEMM and needs resources."""
        return self._temporarily("_overlapped", overlapped)

    @contextmanager
    def _temporarily(self, name: str, value: bool) -> Iterator[None]:
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            yield
        finally:
            setattr(self, name, before)

    def tune(self, weights: Iterable[Tensor]) -> tuple[str, str]:
        """Measure the candidates of each shape and choose; returns the choice and its reason."""
        del weights
        return "torch", "no other kernel for these weights on this device"

    def tune_overlapped(self, weights: Sequence[tuple[Tensor, OverlappedGemm]]) -> None:
        """Measure and choose for `overlapped` GEMMs, each together with its side work."""
        del weights


def batch_invariant_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in chunks of one shape, so that each row is summed in the same order."""
    rows = x.shape[0]
    padded = pad(x, (0, 0, 0, -rows % _INVARIANT_ROWS))
    return torch.cat([linear(chunk, weight) for chunk in padded.split(_INVARIANT_ROWS)])[:rows]
