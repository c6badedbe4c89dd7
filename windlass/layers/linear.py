"""Linear layers: one weight of one or more checkpoint modules, stacked along the outputs.

A layer names its parts and the axis that is sharded over ranks. Its method defines how the weight is
stored; the loader reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from windlass.kernels.batch import AdapterRows
from windlass.kernels.gemm import Norm
from windlass.kernels.gemm_io import InputQuant, Inputs, Outputs
from windlass.kernels.lora import Lora
from windlass.kernels.reference_linear import Unpacked
from windlass.layers.stored import StoredWeight
from windlass.parallel.mesh import Group
from windlass.quant.base import LinearMethod

Shard = Literal["out", "in"]
MethodFor = Callable[[Iterable[str]], LinearMethod]  # from the names of a layer's parts


class Linear(StoredWeight):
    """y = x W.T + b.

    `parts` maps checkpoint modules to their outputs, as in {"q_proj": 576, "k_proj": 192}.
    With shard="out" (column-parallel) a rank holds some outputs of every part; with shard="in"
    (row-parallel) some inputs of all parts, and the outputs are all-reduced. The weight exists after
    the loader has filled `stored` and the method has finished the layer.

    Steps with adapters add LoRA deltas to the GEMM's outputs; their inputs must not be quantised.
    """

    def __init__(
        self,
        parts: Mapping[str, int],
        num_in: int,
        method: LinearMethod,
        group: Group,
        shard: Shard = "out",
        bias: torch.dtype | None = None,
    ) -> None:
        out_shards, in_shards = (group.size, 1) if shard == "out" else (1, group.size)
        own = {name: num_out // out_shards for name, num_out in parts.items()}
        super().__init__(own, num_in // in_shards, method)
        self.group = group
        self.shard = shard
        self.lora: Lora | None = None  # adapter slots, if LoRA is enabled
        if bias is not None:
            num_out = sum(self.parts.values())
            self.bias = nn.Parameter(torch.empty(num_out, dtype=bias), requires_grad=False)

    @property
    def plain_weights(self) -> list[Tensor]:
        """Weights that GEMMs read unquantised: the parameter, or dequantised weights."""
        prepared = [gemm.prepared for gemm in self.gemms]
        unpacked = [each.weight for each in prepared if isinstance(each, Unpacked)]
        return unpacked if self.weight is None else [self.weight, *unpacked]

    def input_quant(self, num_rows: int) -> InputQuant | None:
        """How inputs of `num_rows` rows should be quantised; None: not at all."""
        return self.gemms[0].prepared.input_quant(num_rows) if len(self.gemms) == 1 else None

    def raw(self, x: Inputs, adapters: AdapterRows | None = None) -> Outputs:
        """y, possibly with separate scales that the caller must apply."""
        separate = adapters is not None or self.bias is not None or self.shard == "in"
        if separate or len(self.gemms) != 1:
            return self(x, adapters)
        return self.gemms[0].prepared.raw(x)

    def forward(self, x: Inputs, adapters: AdapterRows | None = None) -> Tensor:
        if adapters is None or self.lora is None:
            y = self.method.apply(self, x)
        else:
            assert isinstance(x, Tensor)  # steps with adapters never quantise inputs
            low = self.lora.begin(x, adapters)
            y = self.lora.end(self.method.apply(self, x), low, adapters)
        if self.shard == "in":
            y = self.group.all_reduce(y)
        return y if self.bias is None else y + self.bias

    def then(
        self, x: Inputs, residual: Tensor, norm: Norm, adapters: AdapterRows | None = None
    ) -> tuple[Inputs, Tensor]:
        """Add y to the residual stream and normalise: (normalised, new residual)."""
        separate = self.bias is not None or (self.shard == "in" and self.group.size > 1)
        if adapters is not None and self.lora is not None and not separate:
            assert isinstance(x, Tensor)
            low = self.lora.begin(x, adapters)
            return self.lora.then(self.method.apply(self, x), low, adapters, residual, norm)
        if adapters is not None or separate:
            return norm.add(self(x, adapters), residual, unquantised=adapters is not None)
        return self.method.then(self, x, residual, norm)

    def gated(
        self,
        x: Inputs,
        silu_mul: Callable[[Outputs], Inputs],
        adapters: AdapterRows | None = None,
    ) -> Inputs:
        """silu(first half of y) * second half of y, for a layer of two parts."""
        if adapters is not None and self.lora is not None and self.bias is None:
            assert isinstance(x, Tensor)
            low = self.lora.begin(x, adapters)
            return self.lora.gated(self.method.apply(self, x), low, adapters, silu_mul)
        if adapters is not None or self.bias is not None:
            return silu_mul(self(x, adapters))
        return self.method.gated(self, x, silu_mul)
