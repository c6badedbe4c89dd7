"""The MLPs of decoder layers."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial

import torch
from torch import Tensor, nn

from windlass.kernels.batch import AdapterRows
from windlass.kernels.gemm import Norm
from windlass.kernels.gemm_io import Inputs
from windlass.kernels.ops import Ops
from windlass.kernels.token_split import TokenSplit
from windlass.layers.linear import Linear, MethodFor
from windlass.parallel.mesh import Group
from windlass.quant.shard import Shard


class _MLP(nn.Module):
    """down(hidden activations), added to the residual stream and normalised by the next norm."""

    down_proj: Linear

    @abstractmethod
    def _activated(self, x: Inputs, adapters: AdapterRows | None) -> Inputs:
        """The hidden activations."""

    def forward(
        self,
        x: Inputs,
        residual: Tensor,
        norm: Norm,
        adapters: AdapterRows | None = None,
        split: TokenSplit | None = None,
    ) -> tuple[Inputs, Tensor]:
        """x has all tokens; with `split`, the residual stream and the results have this rank's."""
        return self.down_proj.then(self._activated(x, adapters), residual, norm, adapters, split)

    def output(
        self, x: Inputs, adapters: AdapterRows | None = None, split: TokenSplit | None = None
    ) -> Tensor:
        """The result, without residual addition and norm."""
        return self.down_proj.output(self._activated(x, adapters), adapters, split)


class GatedMLP(_MLP):
    """down(f(gate(x)) * up(x))."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        method_for: MethodFor,
        ops: Ops,
        group: Group,
        bias: torch.dtype | None = None,
        activation: str = "silu",
    ) -> None:
        super().__init__()
        self.ops = ops
        self.activation = activation
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

    def _activated(self, x: Inputs, adapters: AdapterRows | None) -> Inputs:
        if self.activation == "gelu_tanh":
            return self.ops.gelu_mul(self.gate_up_proj(x, adapters))
        if self.activation != "silu":
            gate, up = self.gate_up_proj(x, adapters).chunk(2, dim=-1)
            return self.ops.activate(gate.contiguous(), self.activation) * up
        silu_mul, input_quant = self.ops.silu_mul, self.down_proj.input_quant(x.shape[0])
        if input_quant is not None and adapters is None:
            silu_mul = partial(silu_mul, input_quant=input_quant)
        return self.gate_up_proj.gated(x, silu_mul, adapters)


class PlainMLP(_MLP):
    """down(f(up(x)))."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        method_for: MethodFor,
        ops: Ops,
        group: Group,
        activation: str,
        bias: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.ops = ops
        self.activation = activation
        hidden, inner = Shard(hidden_size), Shard.even(intermediate_size, group)
        self.up_proj = Linear(
            outputs={"up_proj": inner},
            inputs=hidden,
            method=method_for(["up_proj"]),
            group=group,
            bias=bias,
        )
        self.down_proj = Linear(
            outputs={"down_proj": hidden},
            inputs=inner,
            method=method_for(["down_proj"]),
            group=group,
            bias=bias,
        )

    def _activated(self, x: Inputs, adapters: AdapterRows | None) -> Inputs:
        return self.ops.activate(self.up_proj(x, adapters), self.activation)
