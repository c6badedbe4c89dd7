"""Unquantised weights: float32, bfloat16, float16. The reference for all other formats."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from windlass.kernels.gemm import Norm, TorchGemm
from windlass.kernels.gemm_io import Inputs, Outputs
from windlass.kernels.packed import Packed
from windlass.quant.base import Axis, Layer, ParamSpec
from windlass.quant.join import join_rows


class Unquantised:
    """A weight [out, in] in the activation dtype, all parts in one tensor.

    `name` and `reason` describe a quantised format that the checkpoint's reader dequantises.
    """

    cuts_inputs = True

    def __init__(
        self,
        dtype: torch.dtype,
        gemm: TorchGemm | None = None,
        name: str | None = None,
        reason: str = "not quantised",
    ) -> None:
        self._dtype = dtype
        self._gemm = gemm or TorchGemm()
        self._name = name
        self.reason = reason

    @property
    def name(self) -> str:
        return self._name or self.form

    @property
    def form(self) -> str:
        return str(self._dtype).removeprefix("torch.")

    def params(self, part: str, num_out: int, num_in: int) -> dict[str, ParamSpec]:
        del part
        return {"weight": ParamSpec((num_out, num_in), self._dtype, out=Axis(0), into=Axis(1))}

    def forms(self, layer: Layer) -> list[Packed | Tensor]:
        weights = [layer.stored.pop(part)["weight"] for part in layer.parts]
        return [weights[0] if len(weights) == 1 else join_rows(weights)]

    def finish(self, layer: Layer) -> None:
        (weight,) = self.forms(layer)
        assert isinstance(weight, Tensor)
        # A tied head gets the embedding's table, which is a parameter already.
        if not isinstance(weight, nn.Parameter):
            weight = nn.Parameter(weight, requires_grad=False)
        layer.weight = weight

    def takes_unnormalised(self, layer: Layer, num_rows: int) -> bool:
        assert layer.weight is not None
        return self._gemm.takes_unnormalised(layer.weight, num_rows)

    def apply(self, layer: Layer, x: Inputs) -> Tensor:
        return self._gemm.linear(x, layer.weight)  # type: ignore[arg-type]

    def then(self, layer: Layer, x: Inputs, residual: Tensor, norm: Norm) -> tuple[Inputs, Tensor]:
        return self._gemm.linear_norm(x, layer.weight, residual, norm)  # type: ignore[arg-type]

    def gated(self, layer: Layer, x: Inputs, silu_mul: Callable[[Outputs], Inputs]) -> Inputs:
        return self._gemm.gated(x, layer.weight, silu_mul)  # type: ignore[arg-type]
