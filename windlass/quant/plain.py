"""Weights as plain numbers: float32, bfloat16, float16. The reference for all other formats."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from windlass.quant.base import Axis, ParamSpec


class Plain:
    """A weight [out, in] in the arithmetic's own type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    @property
    def name(self) -> str:
        return str(self._dtype).removeprefix("torch.")

    def params(self, num_out: int, num_in: int) -> dict[str, ParamSpec]:
        return {"weight": ParamSpec((num_out, num_in), self._dtype, out=Axis(0), into=Axis(1))}

    def finish(self, layer: nn.Module) -> None:
        """Nothing to repack."""

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        return linear(x, layer.weight)  # type: ignore[arg-type]
