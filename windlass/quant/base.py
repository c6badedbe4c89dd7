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

from windlass.errors import CheckpointError
from windlass.kernels.gemm import Norm
from windlass.kernels.linears import PackedGemm
from windlass.kernels.rounded import Inputs, Outputs


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
    """A stored tensor of one part: its shape, type, and where outputs and inputs lie."""

    shape: tuple[int, ...]  # -1: as long as the file says
    dtype: torch.dtype  # floats may be stored in another float type, whole numbers may not
    out: Axis | None = None  # None: the tensor has no such axis and is not cut along it
    into: Axis | None = None
    raw: bool = False  # the file's own bytes, not the numbers that they stand for
    optional: bool = False


@dataclass(slots=True)
class Part:
    """The stored tensors of one part of a layer, on the device, between reading and finishing."""

    name: str  # "model.layers.0.self_attn.q_proj"
    tensors: dict[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def scales(self, name: str, zero_is_fine: bool = False) -> Tensor:
        """A tensor of scales; one that is no number, infinite or zero is an error."""
        scales = self.tensors[name]
        check_scales(scales, f"{self.name}.{name}", zero_is_fine)
        return scales


def check_scales(scales: Tensor, name: str, zero_is_fine: bool = False) -> None:
    """Raise with the tensor's name where a scale would spoil the weights."""
    if scales.is_meta:
        return
    bad = ~torch.isfinite(scales)
    if not zero_is_fine:
        bad |= scales == 0
    count = int(bad.sum())
    if count:
        first = scales[bad].flatten()[0].item()
        raise CheckpointError(
            f"tensor {name}: {count} of {scales.numel()} scales are unusable (the first: {first}). "
            "The checkpoint is damaged, or was quantised from weights that are; fetch or make it "
            "again."
        )


class Layer(Protocol):
    """What a method sees of a linear layer."""

    parts: dict[str, int]  # name to outputs, in the order in which they are stacked
    num_in: int
    stored: dict[str, Part]  # by part; filled by the loader, emptied by `finish`
    weight: nn.Parameter | None  # of a layer that is not quantised
    gemm: list[PackedGemm]  # of one that is; their outputs follow each other


class LinearMethod(Protocol):
    """One way to store and multiply a weight."""

    @property
    def name(self) -> str: ...

    def params(self, part: str, num_out: int, num_in: int) -> dict[str, ParamSpec]:
        """The stored tensors of a part of this size, by its whole name."""
        ...

    def finish(self, layer: Layer) -> None:
        """Once, after loading: repack `layer.stored` for the chosen kernel."""
        ...

    def apply(self, layer: Layer, x: Inputs) -> Tensor:
        """x @ weight.T"""
        ...

    def then(self, layer: Layer, x: Inputs, residual: Tensor, norm: Norm) -> tuple[Inputs, Tensor]:
        """x @ weight.T, into the residual stream and through a norm: (normalised, new residual)."""
        ...

    def gated(self, layer: Layer, x: Inputs, silu_mul: Callable[[Outputs], Inputs]) -> Inputs:
        """silu(x @ gate.T) * (x @ up.T), where the weight is gate above up."""
        ...
