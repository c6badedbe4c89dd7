"""Per-layer embeddings (Gemma 4): each layer gets an embedding of the token beside the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from windlass.kernels.gemm import Norm
from windlass.kernels.gemm_io import Inputs
from windlass.kernels.ops import Ops
from windlass.kernels.reference import ActivationKind
from windlass.kernels.token_split import TokenSplit
from windlass.layers.linear import Linear, MethodFor
from windlass.layers.norm import RMSNorm
from windlass.parallel.mesh import Group
from windlass.quant.shard import Shard


class PerLayerEmbedding(nn.Module):
    """The inputs of all layers: the tokens' own embeddings, plus projections of those of the network."""

    def __init__(
        self,
        table: nn.Module,
        *,
        hidden_size: int,
        size: int,
        num_layers: int,
        eps: float,
        method_for: MethodFor,
        ops: Ops,
        group: Group,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.ops = ops
        self.embed_tokens = table
        self._scale = torch.tensor(size**0.5, dtype=dtype, device="cpu").item()
        self._projection_scale = hidden_size**-0.5
        self.projection = Linear(
            outputs={"projection": Shard(num_layers * size)},
            inputs=Shard(hidden_size),
            method=method_for(["projection"]),
            group=group,
        )
        self.norm = RMSNorm(size=size, eps=eps, dtype=torch.float32, ops=ops)

    def forward(self, ids: Tensor, embedded: Tensor, split: TokenSplit | None) -> Tensor:
        """[tokens, layers * size]; `embedded`: the embeddings of the same tokens, scaled."""
        projected = self.projection(embedded) * self._projection_scale
        projected = self.ops.group_norm(projected, self.norm.weight, self.norm.eps)
        return (projected + self.embed_tokens(ids, split) * self._scale) * 2.0**-0.5


class PerLayerInput(nn.Module):
    """Adds a layer's input, gated by the residual stream, to the residual stream."""

    def __init__(
        self,
        index: int,
        *,
        hidden_size: int,
        size: int,
        activation: ActivationKind,
        norm: nn.Module,
        method_for: MethodFor,
        ops: Ops,
        group: Group,
    ) -> None:
        super().__init__()
        self.ops = ops
        self._first = index * size
        self._activation: ActivationKind = activation
        self.input_gate = Linear(
            outputs={"input_gate": Shard(size)},
            inputs=Shard(hidden_size),
            method=method_for(["input_gate"]),
            group=group,
        )
        self.projection = Linear(
            outputs={"projection": Shard(hidden_size)},
            inputs=Shard(size),
            method=method_for(["projection"]),
            group=group,
        )
        self.norm = norm

    def forward(
        self, residual: Tensor, inputs: Tensor, norm: Norm, unquantised: bool
    ) -> tuple[Inputs, Tensor]:
        """(normalised, new residual stream). `inputs`: of all layers, for the same tokens."""
        gate = self.ops.activate(self.input_gate(residual), self._activation)
        gated = self.ops.mul_columns(gate, inputs, self._first)
        return norm.add(self.norm(self.projection(gated)), residual, unquantised)
