"""Online quantisation: 16-bit or random weights, quantised while loading (`--quantization`)."""

from __future__ import annotations

from torch import Tensor

from windlass.kernels.linears import Linears
from windlass.kernels.packed import Packed
from windlass.quant.base import Axis, ParamSpec, Part
from windlass.quant.packed_method import PackedMethod, Shape
from windlass.quant.rounding import Scheme, quantise


class Online(PackedMethod):
    """Reads unquantised weights and quantises them to a scheme."""

    def __init__(self, scheme: Scheme, linears: Linears) -> None:
        super().__init__(scheme.name, linears)
        self._scheme = scheme

    def params(self, part: str, num_out: int, num_in: int) -> dict[str, ParamSpec]:
        self._scheme.group(num_in, part)  # raises for an invalid group size before anything is read
        dtype = self._linears.dtype
        return {"weight": ParamSpec((num_out, num_in), dtype, out=Axis(0), into=Axis(1))}

    def form(self, part: Part, shape: Shape) -> Packed | Tensor:
        del shape
        return quantise(part["weight"], self._scheme)
