"""Linear layers: one weight made of one or more parts of a checkpoint, stacked along the outputs.

A layer says which parts it is made of and along which axis ranks share it. How the weight is
stored is its method's business, and reading it the loader's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from windlass.parallel.mesh import Group
from windlass.quant.base import LinearMethod

Shard = Literal["out", "in"]


class Linear(nn.Module):
    """y = x W.T + b.

    `parts` maps names of checkpoint modules to their outputs, as in {"q_proj": 576, "k_proj": 192}.
    Sharded by "out", a rank holds some outputs of every part; by "in", some inputs of all of them,
    and the ranks' results are summed.
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
        super().__init__()
        self.parts = dict(parts)
        self.num_in = num_in
        self.method = method
        self.group = group
        self.shard = shard
        cut_out, cut_in = (group.size, 1) if shard == "out" else (1, group.size)
        num_out = sum(self.parts.values()) // cut_out
        for name, spec in method.params(num_out, num_in // cut_in).items():
            tensor = torch.empty(spec.shape, dtype=spec.dtype)
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.bias: nn.Parameter | None = None
        if bias is not None:
            self.bias = nn.Parameter(torch.empty(num_out, dtype=bias), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.method.apply(self, x)
        if self.shard == "in":
            y = self.group.all_reduce(y)
        return y if self.bias is None else y + self.bias

    def gated(self, x: Tensor, silu_mul: Callable[[Tensor], Tensor]) -> Tensor:
        """silu(first half of y) * second half, for a layer of two parts."""
        if self.bias is not None:
            return silu_mul(self(x))
        return self.method.gated(self, x, silu_mul)
