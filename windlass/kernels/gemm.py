"""Products with 16- and 32-bit weights: torch's own, for any device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from windlass.kernels.rounded import Inputs, Outputs, Rounding

# Products in a fixed order are of so many rows at a time: libraries choose by the number of rows
# how they cut the sums.
_INVARIANT_ROWS = 16


# What is computed beside a product, and after both: of the inputs, and whoever makes the product.
Company = Callable[[Tensor, Callable[[], Tensor]], Tensor]


class Norm(Protocol):
    """The norm behind a product."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def eps(self) -> float: ...

    def rounding(self, num_rows: int) -> Rounding | None:
        """How whoever reads the result wants so many rows; None: as they are."""
        ...

    def add(
        self, x: Outputs, residual: Tensor | None, unquantised: bool = False
    ) -> tuple[Inputs, Tensor]:
        """(x + residual, normalised; x + residual); `unquantised`: never quantise the sum"""
        ...


class TorchGemm:
    """What torch and the libraries behind it do."""

    def __init__(self) -> None:
        self._batch_invariant = False
        self._accompanied = False

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x @ weight.T"""
        return batch_invariant_linear(x, weight) if self._batch_invariant else linear(x, weight)

    def gated(self, x: Tensor, weight: Tensor, silu_mul: Callable[[Outputs], Inputs]) -> Inputs:
        """silu(x @ gate.T) * (x @ up.T), where weight is gate above up."""
        return silu_mul(self.linear(x, weight))

    def linear_norm(
        self, x: Tensor, weight: Tensor, residual: Tensor, norm: Norm
    ) -> tuple[Inputs, Tensor]:
        """A product and the norm behind it: (residual + product, normalised; residual + product)."""
        return norm.add(self.linear(x, weight), residual)

    def batch_invariant(self, batch_invariant: bool = True) -> AbstractContextManager[None]:
        """While it lasts, a row's result does not depend on the rows beside it."""
        return self._meanwhile("_batch_invariant", batch_invariant)

    def accompanied(self, accompanied: bool = True) -> AbstractContextManager[None]:
        """While it lasts, something else is computed beside every product, and wants room for it."""
        return self._meanwhile("_accompanied", accompanied)

    @contextmanager
    def _meanwhile(self, name: str, value: bool) -> Iterator[None]:
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            yield
        finally:
            setattr(self, name, before)

    def tune(self, weights: Iterable[Tensor]) -> tuple[str, str]:
        """Choose by measuring, once, where there is a choice; returns what was chosen and why."""
        del weights
        return "torch", "nothing else multiplies these weights here"

    def tune_accompanied(self, weights: Sequence[tuple[Tensor, Company]]) -> None:
        """The same for steps whose products are accompanied, each with what goes with it."""
        del weights


def batch_invariant_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in pieces of always the same shape, so that each row is summed in the same order."""
    rows = x.shape[0]
    padded = pad(x, (0, 0, 0, -rows % _INVARIANT_ROWS))
    return torch.cat([linear(piece, weight) for piece in padded.split(_INVARIANT_ROWS)])[:rows]
