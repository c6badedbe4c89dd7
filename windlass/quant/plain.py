"""Weights as plain numbers: float32, bfloat16, float16. The reference for all other formats."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from windlass.kernels.products import TorchProducts
from windlass.quant.base import Axis, ParamSpec


class Plain:
    """A weight [out, in] in the arithmetic's own type."""

    def __init__(self, dtype: torch.dtype, products: TorchProducts | None = None) -> None:
        self._dtype = dtype
        self._products = products or TorchProducts()

    @property
    def name(self) -> str:
        return str(self._dtype).removeprefix("torch.")

    def params(self, num_out: int, num_in: int) -> dict[str, ParamSpec]:
        return {"weight": ParamSpec((num_out, num_in), self._dtype, out=Axis(0), into=Axis(1))}

    def finish(self, layer: nn.Module) -> None:
        """Nothing to repack."""

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        return self._products.linear(x, layer.weight)  # type: ignore[arg-type]

    def gated(self, layer: nn.Module, x: Tensor, silu_mul: Callable[[Tensor], Tensor]) -> Tensor:
        return self._products.gated(x, layer.weight, silu_mul)  # type: ignore[arg-type]
