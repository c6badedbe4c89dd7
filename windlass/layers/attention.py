"""Attention over paged keys and values, for rows of any length in one batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from windlass.kernels.batch import Heads, LogitsIndices, StepBatch
from windlass.kernels.ops import Ops
from windlass.kernels.rounded import Inputs
from windlass.layers.linear import Linear, MethodFor
from windlass.layers.norm import HeadNorm, RMSNorm
from windlass.parallel.mesh import Group


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What one attention layer looks like."""

    hidden_size: int
    heads: Heads
    qkv_bias: bool = False
    o_bias: bool = False
    norm_eps: float | None = None  # set: queries and keys are normalised per head
    window: int | None = None
    input_size: int | None = None  # where it differs from the size of what comes out


class Attention(nn.Module):
    """Projects, rotates, writes keys and values to their pages, attends, projects back.

    The result goes into the residual stream and through the norm that follows.
    """

    def __init__(
        self,
        index: int,
        shape: AttentionShape,
        method_for: MethodFor,
        ops: Ops,
        group: Group,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.index = index
        self.window = shape.window
        self.ops = ops
        whole = shape.heads
        self.heads = Heads(whole.num_q // group.size, whole.num_kv // group.size, whole.dim)
        out, kv_out = whole.num_q * whole.dim, whole.num_kv * whole.dim
        parts = {"q_proj": out, "k_proj": kv_out, "v_proj": kv_out}
        self.qkv_proj = Linear(
            parts,
            shape.input_size or shape.hidden_size,
            method_for(parts),
            group,
            bias=dtype if shape.qkv_bias else None,
        )
        self.o_proj = Linear(
            {"o_proj": shape.hidden_size},
            out,
            method_for(["o_proj"]),
            group,
            shard="in",
            bias=dtype if shape.o_bias else None,
        )
        self.q_norm = self.k_norm = None
        if shape.norm_eps is not None:
            self.q_norm = HeadNorm(whole.dim, shape.norm_eps, dtype)
            self.k_norm = HeadNorm(whole.dim, shape.norm_eps, dtype)

    def forward(
        self,
        x: Inputs,
        residual: Tensor,
        norm: RMSNorm,
        batch: StepBatch,
        cos_sin: Tensor,
        logits_indices: LogitsIndices | None = None,
    ) -> tuple[Inputs, Tensor]:
        """Behind attention only `logits_indices` tokens go on, or all."""
        kv = batch.kv[self.index]
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        qkv = self.qkv_proj.raw(x, batch.adapters)
        mixed = self.ops.attend(qkv, self.heads, cos_sin, norms, kv, batch, self.window).flatten(1)
        if logits_indices is None:
            return self.o_proj.then(mixed, residual, norm, batch.adapters)
        mixed, residual = (
            self.ops.gather(rows, logits_indices.tokens) for rows in (mixed, residual)
        )
        return self.o_proj.then(mixed, residual, norm, logits_indices.adapters)
