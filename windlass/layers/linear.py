"""Linear layers: one weight made of one or more parts of a checkpoint, stacked along the outputs.

A layer says which parts it is made of and along which axis ranks share it. How the weight is
stored is its method's business, and reading it the loader's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from windlass.kernels.batch import AdapterRows
from windlass.kernels.gemm import Norm
from windlass.kernels.lora import Lora
from windlass.kernels.plain_linear import Unpacked
from windlass.kernels.rounded import Inputs, Outputs, Rounding
from windlass.layers.stored import StoredWeight
from windlass.parallel.mesh import Group
from windlass.quant.base import LinearMethod

Shard = Literal["out", "in"]
MethodFor = Callable[[Iterable[str]], LinearMethod]  # by the names of a layer's parts


class Linear(StoredWeight):
    """y = x W.T + b.

    Sharded by "out", a rank holds some outputs of every part; by "in", some inputs of all of them,
    and the ranks' results are summed.

    Steps with adapters add what those change to the product, for which inputs must not be rounded.
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
        cut_out, cut_in = (group.size, 1) if shard == "out" else (1, group.size)
        own = {name: num_out // cut_out for name, num_out in parts.items()}
        super().__init__(own, num_in // cut_in, method)
        self.group = group
        self.shard = shard
        self.lora: Lora | None = None  # room for adapters, where an engine has any
        if bias is not None:
            num_out = sum(self.parts.values())
            self.bias = nn.Parameter(torch.empty(num_out, dtype=bias), requires_grad=False)

    @property
    def plain_weights(self) -> list[Tensor]:
        """What is multiplied with as it is: a plain weight, or what was unpacked."""
        held = [gemm.prepared for gemm in self.gemm]
        unpacked = [each.weight for each in held if isinstance(each, Unpacked)]
        return unpacked if self.weight is None else [self.weight, *unpacked]

    def rounding(self, num_rows: int) -> Rounding | None:
        """How so many rows of inputs should come; None: as they are."""
        return self.gemm[0].prepared.rounding(num_rows) if len(self.gemm) == 1 else None

    def raw(self, x: Inputs, adapters: AdapterRows | None = None) -> Outputs:
        """y, perhaps with scales that its reader has to multiply in."""
        separate = adapters is not None or self.bias is not None or self.shard == "in"
        if separate or len(self.gemm) != 1:
            return self(x, adapters)
        return self.gemm[0].prepared.raw(x)

    def forward(self, x: Inputs, adapters: AdapterRows | None = None) -> Tensor:
        if adapters is None or self.lora is None:
            y = self.method.apply(self, x)
        else:
            assert isinstance(x, Tensor)  # nobody rounds in steps with adapters
            low = self.lora.begin(x, adapters)
            y = self.lora.end(self.method.apply(self, x), low, adapters)
        if self.shard == "in":
            y = self.group.all_reduce(y)
        return y if self.bias is None else y + self.bias

    def then(
        self, x: Inputs, residual: Tensor, norm: Norm, adapters: AdapterRows | None = None
    ) -> tuple[Inputs, Tensor]:
        """y into the residual stream and through a norm: (normalised, new residual)."""
        apart = self.bias is not None or (self.shard == "in" and self.group.size > 1)
        if adapters is not None and self.lora is not None and not apart:
            assert isinstance(x, Tensor)
            low = self.lora.begin(x, adapters)
            return self.lora.then(self.method.apply(self, x), low, adapters, residual, norm)
        if adapters is not None or apart:
            return norm.add(self(x, adapters), residual, whole=adapters is not None)
        return self.method.then(self, x, residual, norm)

    def gated(
        self,
        x: Inputs,
        silu_mul: Callable[[Outputs], Inputs],
        adapters: AdapterRows | None = None,
    ) -> Inputs:
        """silu(first half of y) * second half, for a layer of two parts."""
        if adapters is not None and self.lora is not None and self.bias is None:
            assert isinstance(x, Tensor)
            low = self.lora.begin(x, adapters)
            return self.lora.gated(self.method.apply(self, x), low, adapters, silu_mul)
        if adapters is not None or self.bias is not None:
            return silu_mul(self(x, adapters))
        return self.method.gated(self, x, silu_mul)
