"""How a stored weight describes its own geometry, so that one loader shards and merges any format.

A format is one file here: a `LinearMethod` that names its stored tensors, repacks them once for the
kernel that was chosen, and multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Axis:
    """Where a logical axis (outputs or inputs) lies in a stored tensor.

    `unit` features make one stored unit, which has `width` entries along `dim`: int4 packed in
    int32 along the inputs is Axis(1, unit=8), one scale per group of 128 is Axis(1, unit=128).
    """

    dim: int
    unit: int = 1
    width: int = 1

    def span(self, start: int, count: int) -> slice:
        """The stored entries of features [start, start + count), which must be whole units."""
        if start % self.unit or count % self.unit:
            raise ValueError(
                f"features {start}..{start + count} cut a stored unit of {self.unit} features"
            )
        return slice(start // self.unit * self.width, (start + count) // self.unit * self.width)


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A stored tensor of a linear layer: its shape, type, and where outputs and inputs lie."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    out: Axis | None = None  # None: the tensor has no such axis and is not cut along it
    into: Axis | None = None


class LinearMethod(Protocol):
    """One way to store and multiply a weight."""

    @property
    def name(self) -> str: ...

    def params(self, num_out: int, num_in: int) -> dict[str, ParamSpec]:
        """The stored tensors of a weight of this size."""
        ...

    def finish(self, layer: nn.Module) -> None:
        """Once, after loading: repack for the chosen kernel."""
        ...

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        """x @ weight.T"""
        ...

    def gated(self, layer: nn.Module, x: Tensor, silu_mul: Callable[[Tensor], Tensor]) -> Tensor:
        """silu(x @ gate.T) * (x @ up.T), where the weight is gate above up."""
        ...
