"""Online quantisation: 16-bit or random weights, quantised while loading (`--quantization`)."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.kernels.linears import Linears
from windlass.kernels.packed import Packed
from windlass.quant.base import Axis, ParamSpec, Part
from windlass.quant.packed_method import PackedMethod, Shape
from windlass.quant.rounding import Scheme, quantise


class Online(PackedMethod):
    """Reads unquantised weights and quantises them to a scheme.

    Shards end at groups and blocks of the whole weight, so ranks quantise to the same codes as one
    rank alone. Only scales of whole rows differ if the inputs are cut: each rank has its own.
    """

    def __init__(self, scheme: Scheme, linears: Linears) -> None:
        super().__init__(scheme.name, linears)
        self._scheme = scheme
        self._outlines: dict[tuple[torch.Size, torch.dtype], Packed] = {}  # of meta tensors

    def params(self, part: str, num_out: int, num_in: int) -> dict[str, ParamSpec]:
        rows, columns = self._scheme.block or (1, 1)
        group = self._scheme.group(num_in, part)  # raises for an invalid size before any reading
        if group in self._scheme.groups:
            columns = group
        return {
            "weight": ParamSpec(
                shape=(num_out, num_in),
                dtype=self._linears.dtype,
                out=Axis(0, rows, rows),
                into=Axis(1, columns, columns),
            )
        }

    def form(self, part: Part, shape: Shape) -> Packed | Tensor:
        del shape
        # The shard's group size is the whole weight's: sizes that divide the shard divide the whole.
        weight = part["weight"]
        if not weight.is_meta:
            return quantise(weight, self._scheme)
        # Hundreds of experts have the same shape, and rounding a meta tensor takes milliseconds.
        key = weight.shape, weight.dtype
        if key not in self._outlines:
            self._outlines[key] = quantise(weight, self._scheme)
        return self._outlines[key]
