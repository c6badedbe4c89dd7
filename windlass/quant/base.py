"""Descriptions of stored weights, with which one loader shards and merges any format.

A format is one file: a `LinearMethod` that names its stored tensors, repacks them once for the
chosen kernel, and applies them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from windlass.errors import CheckpointError
from windlass.kernels.gemm import Norm
from windlass.kernels.gemm_io import Inputs, Outputs
from windlass.kernels.linears import PackedGemm


@dataclass(frozen=True, slots=True)
class Axis:
    """The position of a logical axis (outputs or inputs) in a stored tensor.

    `unit` features form one stored unit of `width` entries along `dim`: int4 packed in
    int32 along the inputs is Axis(1, unit=8), one scale per group of 128 is Axis(1, unit=128).
    """

    dim: int
    unit: int = 1
    width: int = 1

    def span(self, start: int, count: int) -> slice:
        """The stored entries of features [start, start + count). Units must not be split."""
        if start % self.unit or count % self.unit:
            raise ValueError(
                f"features {start}..{start + count} split a stored unit of {self.unit} features"
            )
        return slice(start // self.unit * self.width, (start + count) // self.unit * self.width)


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A stored tensor of one part: shape, dtype, and the axes of outputs and inputs."""

    shape: tuple[int, ...]  # -1: the length in the file
    dtype: torch.dtype  # the file may store another float dtype, but not another integer dtype
    out: Axis | None = None  # None: the tensor has no such axis and is not sharded along it
    into: Axis | None = None
    raw: bool = False  # read the file's bytes, not the dequantised values
    optional: bool = False


@dataclass(slots=True)
class Part:
    """The stored tensors of one part of a layer, on the device, between `read` and `finish`."""

    name: str  # "model.layers.0.self_attn.q_proj"
    tensors: dict[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def scales(self, name: str, allow_zero: bool = False) -> Tensor:
        """A tensor of scales. Raises for NaN, infinity and, by default, zero."""
        scales = self.tensors[name]
        check_scales(scales, f"{self.name}.{name}", allow_zero)
        return scales


def check_scales(scales: Tensor, name: str, allow_zero: bool = False) -> None:
    """Raise CheckpointError, with the tensor's name, if a scale is invalid."""
    if scales.is_meta:
        return
    bad = ~torch.isfinite(scales)
    if not allow_zero:
        bad |= scales == 0
    count = int(bad.sum())
    if count:
        first = scales[bad].flatten()[0].item()
        raise CheckpointError(
            f"tensor {name}: {count} of {scales.numel()} scales are invalid (the first: {first}). "
            "The checkpoint is damaged, or was quantised from damaged weights; download or "
            "quantise it again."
        )


class Layer(Protocol):
    """A linear layer as a method sees it."""

    parts: dict[str, int]  # name to outputs, in stacking order
    num_in: int
    stored: dict[str, Part]  # by part; filled by the loader, emptied by `finish`
    weight: nn.Parameter | None  # of an unquantised layer
    gemms: list[PackedGemm]  # of a quantised layer; outputs are concatenated


class LinearMethod(Protocol):
    """Stores and applies the weights of linear layers in one format; vLLM: LinearMethodBase."""

    @property
    def name(self) -> str: ...

    def params(self, part: str, num_out: int, num_in: int) -> dict[str, ParamSpec]:
        """The stored tensors of a part. `part` is its full module name."""
        ...

    def finish(self, layer: Layer) -> None:
        """Repack `layer.stored` for the chosen kernel. Called once, after loading."""
        ...

    def apply(self, layer: Layer, x: Inputs) -> Tensor:
        """x @ weight.T"""
        ...

    def then(self, layer: Layer, x: Inputs, residual: Tensor, norm: Norm) -> tuple[Inputs, Tensor]:
        """Add x @ weight.T to the residual stream and normalise: (normalised, new residual)."""
        ...

    def gated(self, layer: Layer, x: Inputs, silu_mul: Callable[[Outputs], Inputs]) -> Inputs:
        """silu(x @ gate.T) * (x @ up.T); the weight is gate and up, stacked along the outputs."""
        ...
