"""The gated MLP of a decoder layer."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from windlass.kernels.batch import AdapterRows
from windlass.kernels.gemm_io import Inputs
from windlass.kernels.ops import Ops
from windlass.layers.linear import Linear, MethodFor
from windlass.layers.norm import RMSNorm
from windlass.parallel.mesh import Group
from windlass.quant.shard import Shard


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), added to the residual stream and normalised by the next norm."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        method_for: MethodFor,
        ops: Ops,
        group: Group,
        bias: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.ops = ops
        hidden, inner = Shard(hidden_size), Shard.even(intermediate_size, group)
        outputs = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = Linear(
            outputs=outputs, inputs=hidden, method=method_for(outputs), group=group, bias=bias
        )
        self.down_proj = Linear(
            outputs={"down_proj": hidden},
            inputs=inner,
            method=method_for(["down_proj"]),
            group=group,
            bias=bias,
        )

    def forward(
        self, x: Inputs, residual: Tensor, norm: RMSNorm, adapters: AdapterRows | None = None
    ) -> tuple[Inputs, Tensor]:
        silu_mul, input_quant = self.ops.silu_mul, self.down_proj.input_quant(x.shape[0])
        if input_quant is not None and adapters is None:
            silu_mul = partial(silu_mul, input_quant=input_quant)
        activated = self.gate_up_proj.gated(x, silu_mul, adapters)
        return self.down_proj.then(activated, residual, norm, adapters)
