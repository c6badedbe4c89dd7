"""Attention over the paged KV cache, for rows of any length in one batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from windlass.kernels.batch import Heads, LogitsIndices, StepBatch
from windlass.kernels.gemm_io import Inputs
from windlass.kernels.ops import Ops
from windlass.layers.linear import Linear, MethodFor
from windlass.layers.norm import HeadNorm, RMSNorm
from windlass.parallel.mesh import Group


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes and options of one attention layer."""

    hidden_size: int
    heads: Heads
    qkv_bias: bool = False
    o_bias: bool = False
    norm_eps: float | None = None  # set: q and k are normalised per head
    window: int | None = None
    input_size: int | None = None  # None: hidden_size


class Attention(nn.Module):
    """QKV projection, RoPE, KV cache write, attention and output projection.

    The output is added to the residual stream and normalised by the next norm.
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
        total = shape.heads
        self.heads = Heads(total.num_q // group.size, total.num_kv // group.size, total.dim)
        out, kv_out = total.num_q * total.dim, total.num_kv * total.dim
        parts = {"q_proj": out, "k_proj": kv_out, "v_proj": kv_out}
        self.qkv_proj = Linear(
            parts=parts,
            num_in=shape.input_size or shape.hidden_size,
            method=method_for(parts),
            group=group,
            bias=dtype if shape.qkv_bias else None,
        )
        self.o_proj = Linear(
            parts={"o_proj": shape.hidden_size},
            num_in=out,
            method=method_for(["o_proj"]),
            group=group,
            shard="in",
            bias=dtype if shape.o_bias else None,
        )
        self.q_norm = self.k_norm = None
        if shape.norm_eps is not None:
            self.q_norm = HeadNorm(total.dim, shape.norm_eps, dtype)
            self.k_norm = HeadNorm(total.dim, shape.norm_eps, dtype)

    def forward(
        self,
        x: Inputs,
        residual: Tensor,
        norm: RMSNorm,
        batch: StepBatch,
        cos_sin: Tensor,
        logits_indices: LogitsIndices | None = None,
    ) -> tuple[Inputs, Tensor]:
        """Return (normalised, new residual) of the `logits_indices` tokens, or of all tokens."""
        kv = batch.kv[self.index]
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        qkv = self.qkv_proj.raw(x, batch.adapters)
        attended = self.ops.attend(qkv, self.heads, cos_sin, norms, kv, batch, self.window).flatten(
            1
        )
        if logits_indices is None:
            return self.o_proj.then(attended, residual, norm, batch.adapters)
        attended, residual = (
            self.ops.gather(rows, logits_indices.tokens) for rows in (attended, residual)
        )
        return self.o_proj.then(attended, residual, norm, logits_indices.adapters)
