"""Attention over paged keys and values, for rows of any length in one batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from windlass.kernels import reference
from windlass.kernels.batch import StepBatch
from windlass.kernels.select import Selection
from windlass.layers.linear import Linear
from windlass.layers.norm import RMSNorm
from windlass.parallel.mesh import Group
from windlass.quant.base import LinearMethod


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What one attention layer looks like."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    norm_eps: float | None = None  # set: queries and keys are normalised per head
    window: int | None = None


class Attention(nn.Module):
    """Projects, rotates, writes keys and values to their pages, attends, projects back."""

    def __init__(
        self,
        index: int,
        shape: AttentionShape,
        method: LinearMethod,
        kernel: Selection,
        group: Group,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.index = index
        self.dim = shape.head_dim
        self.window = shape.window
        self.kernel = kernel
        out, kv_out = shape.num_heads * self.dim, shape.num_kv_heads * self.dim
        self.sizes = [out // group.size, kv_out // group.size, kv_out // group.size]
        parts = {"q_proj": out, "k_proj": kv_out, "v_proj": kv_out}
        self.qkv_proj = Linear(
            parts, shape.hidden_size, method, group, bias=dtype if shape.qkv_bias else None
        )
        self.o_proj = Linear(
            {"o_proj": shape.hidden_size},
            out,
            method,
            group,
            shard="in",
            bias=dtype if shape.o_bias else None,
        )
        self.q_norm = self.k_norm = None
        if shape.norm_eps is not None:
            self.q_norm = RMSNorm(self.dim, shape.norm_eps, dtype)
            self.k_norm = RMSNorm(self.dim, shape.norm_eps, dtype)

    def forward(self, x: Tensor, batch: StepBatch, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.dim)) for part in self.qkv_proj(x).split(self.sizes, -1)
        )  # [tokens, heads, dim]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = reference.rope(q, cos, sin), reference.rope(k, cos, sin)
        kv = batch.kv[self.index]
        reference.write_kv(k, v, kv, batch)
        mixed = self.kernel.function(q, kv, batch, self.dim**-0.5, self.window)
        return self.o_proj(mixed.flatten(1))
