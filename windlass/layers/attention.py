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
from windlass.quant.shard import Shard


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

    The output is added to the residual stream and normalised by the next norm. Ranks split the q heads,
    and the kv heads if there are enough; else neighbouring ranks hold the same kv head.
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
        total, hidden = shape.heads, Shard(shape.hidden_size)
        q = Shard.even(total.num_q * total.dim, group, unit=total.dim)
        kv = Shard.replicated(total.num_kv * total.dim, group, unit=total.dim)
        self.heads = Heads(q.count // total.dim, kv.count // total.dim, total.dim)
        outputs = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        self.qkv_proj = Linear(
            outputs=outputs,
            inputs=Shard(shape.input_size or shape.hidden_size),
            method=method_for(outputs),
            group=group,
            bias=dtype if shape.qkv_bias else None,
        )
        self.o_proj = Linear(
            outputs={"o_proj": hidden},
            inputs=q,
            method=method_for(["o_proj"]),
            group=group,
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
