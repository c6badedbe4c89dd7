"""Weights that are dequantised at load, for layers that do not multiply with them as they are stored."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.quant.base import Layer, ParamSpec
from windlass.quant.packed_method import PackedMethod
from windlass.quant.unquantised import Unquantised


class Dequantised(Unquantised):
    """Reads a packed format and keeps a weight [out, in] in the activation dtype."""

    def __init__(self, method: PackedMethod, dtype: torch.dtype, reason: str) -> None:
        super().__init__(dtype, name=method.name, reason=reason)
        self._method = method
        self.cuts_inputs = method.cuts_inputs

    def params(self, part: str, num_out: int, num_in: int) -> dict[str, ParamSpec]:
        return self._method.params(part, num_out, num_in)

    def finish(self, layer: Layer) -> None:
        for name, num_out in layer.parts.items():
            part = layer.stored[name]
            form = self._method.form(part, (num_out, layer.num_in))
            weight = form if isinstance(form, Tensor) else form.dequantise()
            part.tensors = {"weight": weight.to(self._dtype)}
        super().finish(layer)
