"""Descriptions of stored weights, with which one loader shards and merges any format.

A format is one file: a `LinearMethod` that names its stored tensors, repacks them once for the
chosen kernel, and applies them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from windlass.errors import CheckpointError, ShardError
from windlass.kernels.gemm import Norm
from windlass.kernels.gemm_io import Inputs, Outputs
from windlass.kernels.linears import PackedGemm
from windlass.kernels.packed import Packed
from windlass.quant.shard import Region, Shard


@dataclass(frozen=True, slots=True)
class Axis:
    """The position of a logical axis (outputs or inputs) in a stored tensor.

    `unit` features form one stored unit of `width` entries along `dim`: int4 packed in
    int32 along the inputs is Axis(1, unit=8), one scale per group of 128 is Axis(1, unit=128).
    The last unit may be partial.
    """

    dim: int
    unit: int = 1
    width: int = 1

    def span(self, shard: Shard) -> slice:
        """The stored entries of a shard. Units must not be split."""
        if shard.start % self.unit or (shard.stop % self.unit and shard.stop != shard.whole):
            raise ValueError(
                f"features {shard.start}..{shard.stop} split a stored unit of {self.unit} features"
            )
        return slice(
            shard.start // self.unit * self.width, -(-shard.stop // self.unit) * self.width
        )


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A stored tensor of one whole part: shape, dtype, and the axes of outputs and inputs."""

    shape: tuple[int, ...]  # -1: the length in the file
    dtype: torch.dtype  # the file may store another float dtype, but not another integer dtype
    out: Axis | None = None  # None: the tensor has no such axis, and every rank reads all of it
    into: Axis | None = None
    raw: bool = False  # read the file's bytes, not the dequantised values
    optional: bool = False

    def region(self, outputs: Shard, inputs: Shard) -> Region:
        """The slices that hold a rank's outputs and inputs."""
        slices = [slice(None)] * len(self.shape)
        for axis, shard in ((self.out, outputs), (self.into, inputs)):
            if axis is not None and not shard.is_whole:
                slices[axis.dim] = axis.span(shard)
        return () if slices == [slice(None)] * len(slices) else tuple(slices)


@dataclass(slots=True)
class Part:
    """A rank's stored tensors of one part of a layer, on the device, between `read` and `finish`."""

    name: str  # "model.layers.0.self_attn.q_proj"
    tensors: dict[str, Tensor]
    outputs: Shard
    inputs: Shard

    @property
    def whole_shape(self) -> tuple[int, int]:
        """Outputs and inputs of the part on all ranks together."""
        return self.outputs.whole, self.inputs.whole

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


def check_shards(
    part: str, method: str, specs: Collection[ParamSpec], *, outputs: Shard, inputs: Shard
) -> None:
    """Raise ShardError, with the shard counts that work, if a part's outputs or inputs cannot be cut."""
    for features, shard, axes in (
        ("outputs", outputs, [spec.out for spec in specs]),
        ("inputs", inputs, [spec.into for spec in specs]),
    ):
        unit = math.lcm(*(axis.unit for axis in axes if axis is not None))
        if not shard.allows(shard.size, unit):
            raise ShardError(
                f"{part}: {method} weights cannot be cut into {shard.size} shards along their "
                f"{shard.whole} {features}: the unit is {math.lcm(unit, shard.unit)} {features}. "
                f"Numbers of shards that work: {', '.join(map(str, shard.allowed(unit)))}."
            )


class Layer(Protocol):
    """A linear layer as a method sees it: one rank's outputs and inputs."""

    parts: dict[str, int]  # name to this rank's outputs, in stacking order
    num_in: int
    multiplied: bool  # by GEMMs; else only single rows are read
    stored: dict[str, Part]  # by part; filled by the loader, emptied by `finish`
    weight: nn.Parameter | None  # of an unquantised layer
    gemms: list[PackedGemm]  # of a quantised layer; outputs are concatenated


class LinearMethod(Protocol):
    """Stores and applies the weights of linear layers in one format; vLLM: LinearMethodBase."""

    # Whether ranks can divide the inputs. Act-order spreads groups of inputs over all of them.
    cuts_inputs: bool

    @property
    def name(self) -> str: ...

    def params(self, part: str, num_out: int, num_in: int) -> dict[str, ParamSpec]:
        """The stored tensors of a whole part. `part` is its full module name."""
        ...

    def forms(self, layer: Layer) -> Sequence[Packed | Tensor]:
        """Convert `layer.stored` to as few forms as possible, and empty it."""
        ...

    def finish(self, layer: Layer) -> None:
        """Repack `layer.stored` for the chosen kernel. Called once, after loading."""
        ...

    def takes_unnormalised(self, layer: Layer, num_rows: int) -> bool:
        """Whether `apply` and `gated` take `UnnormalisedInputs` of `num_rows` rows."""
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
