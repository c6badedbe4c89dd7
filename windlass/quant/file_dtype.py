"""Unquantised weights in the file's dtype, for kernels that accumulate in float32.

unquantised.py has weights in the activation dtype, which torch's GEMMs read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.kernels.linears import Linears
from windlass.kernels.packed import Packed
from windlass.quant.base import Axis, ParamSpec, Part
from windlass.quant.packed_method import PackedMethod, Shape


class FileDtype(PackedMethod):
    """An unquantised weight [out, in], kept in the dtype of the file."""

    def __init__(self, dtype: torch.dtype, linears: Linears) -> None:
        super().__init__(str(dtype).removeprefix("torch."), linears)
        self.dtype = dtype

    def params(self, part: str, num_out: int, num_in: int) -> dict[str, ParamSpec]:
        del part
        return {"weight": ParamSpec((num_out, num_in), self.dtype, out=Axis(0), into=Axis(1))}

    def form(self, part: Part, shape: Shape) -> Packed | Tensor:
        del shape
        return part["weight"]

    def gives_rows(self, num_out: int, num_in: int) -> bool:
        del num_out, num_in
        return True
