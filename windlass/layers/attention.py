"""Attention over the paged KV cache, for rows of any length in one batch."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from windlass.kernels.attention_options import AttentionOptions, QKNorms, RopeOptions
from windlass.kernels.batch import Heads, LogitsIndices, StepBatch
from windlass.kernels.gemm import Norm
from windlass.kernels.gemm_io import Inputs, Outputs, UnscaledOutputs
from windlass.kernels.ops import Ops
from windlass.layers.linear import Linear, MethodFor
from windlass.layers.norm import HeadNorm, UnitNorm
from windlass.layers.stored import ShardedRows
from windlass.parallel.mesh import Group
from windlass.quant.shard import Shard


@dataclass(frozen=True, slots=True)
class ScoreGrowth:
    """Scores of a query at position p are multiplied by 1 + beta * log(1 + floor((p + first) / length))."""

    beta: float
    length: int
    first: int = 0

    def of(self, positions: Tensor) -> Tensor:
        """The factor of each position, float32."""
        counted = positions + self.first
        periods = torch.div(counted, self.length, rounding_mode="floor").float()
        return 1 + self.beta * torch.log1p(periods)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes and options of one attention layer."""

    hidden_size: int
    heads: Heads
    qkv_bias: bool = False
    o_bias: bool = False
    norm_eps: float = 1e-6  # of the q and k norms
    window: int | None = None
    chunked: bool = False  # the window is that of AttentionOptions.chunked
    input_size: int | None = None  # None: hidden_size
    scale: float | None = None  # of the scores; None: dim ** -0.5
    soft_cap: float | None = None
    sinks: bool = False  # one logit per query head, the parameter `sinks`
    rope: bool = True  # False: q and k are not rotated
    interleaved: bool = False  # RoPE rotates the pairs (2i, 2i + 1)
    # Norms of q and k before RoPE. head: of each head, with one weight [dim] for all. each_head: of each
    # head, with its own weight, [heads, dim]. whole: over all heads together, [heads * dim]. unit: of each
    # head, without a weight.
    qk_norm: Literal["head", "each_head", "whole", "unit"] | None = None
    norm_kind: Literal["rms", "layer"] = "rms"  # layer: LayerNorm without a bias
    value_norm: bool = False  # each head of v is normalised, without a weight
    shares_kv: bool = False  # q_proj only: keys and values are those of another layer
    float32_norms: bool = False  # the weights of q and k norms are kept in float32
    growth: ScoreGrowth | None = None
    # q_proj has the gate of each query head behind the head: outputs are multiplied by its sigmoid.
    gated: bool = False


class AttentionLayer(nn.Module):
    """Attention, or a mixer in its place, whose heads' outputs go through an output projection."""

    qkv_proj: Linear
    o_proj: Linear
    ops: Ops

    @property
    def first_proj(self) -> Linear:
        """The projection that reads the normalised input."""
        return self.qkv_proj

    @abstractmethod
    def _attended(self, x: Inputs, batch: StepBatch, cos_sin: Tensor | None) -> Tensor:
        """The heads' outputs of all tokens; writes what the KV cache keeps of them."""

    def forward(
        self,
        x: Inputs,
        residual: Tensor,
        norm: Norm,
        batch: StepBatch,
        cos_sin: Tensor | None,
        logits_indices: LogitsIndices | None = None,
    ) -> tuple[Inputs, Tensor]:
        """Return (normalised, new residual) of the `logits_indices` tokens, or of all tokens.

        With `batch.split`, inputs and results of all tokens are those of this rank's tokens.
        """
        attended = self._attended(x, batch, cos_sin)
        if logits_indices is None:
            return self.o_proj.then(attended, residual, norm, batch.adapters, batch.split)
        attended = self.ops.gather(attended, logits_indices.tokens)
        residual = self.logits_rows(residual, batch, logits_indices)
        return self.o_proj.then(attended, residual, norm, logits_indices.adapters)

    def logits_rows(
        self, residual: Tensor, batch: StepBatch, logits_indices: LogitsIndices
    ) -> Tensor:
        """The residual stream of the `logits_indices` tokens, on all ranks."""
        if batch.split is None:
            return self.ops.gather(residual, logits_indices.tokens)
        return batch.split.pick(residual, logits_indices.tokens)

    def output(
        self,
        x: Inputs,
        batch: StepBatch,
        cos_sin: Tensor | None,
        logits_indices: LogitsIndices | None = None,
    ) -> Tensor:
        """The result for the `logits_indices` tokens, or all, without residual addition and norm."""
        attended = self._attended(x, batch, cos_sin)
        if logits_indices is None:
            return self.o_proj.output(attended, batch.adapters, batch.split)
        attended = self.ops.gather(attended, logits_indices.tokens)
        return self.o_proj(attended, logits_indices.adapters)


class Attention(AttentionLayer, ShardedRows):
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
        device: torch.device | None = None,
    ) -> None:
        """`device`: of the weights, which unit norms need."""
        super().__init__()
        self.index = index
        self.shape = shape
        self.group = group
        self.ops = ops
        total, hidden = shape.heads, Shard(shape.hidden_size)
        q = Shard.even(total.num_q * total.dim, group, unit=total.dim)
        kv = Shard.replicated(total.num_kv * total.dim, group, unit=total.dim)
        self.heads = Heads(q.count // total.dim, kv.count // total.dim, total.dim)
        queries = replace(q, whole=2 * q.whole, unit=2 * q.unit) if shape.gated else q
        outputs = {"q_proj": queries}
        if not shape.shares_kv:
            outputs |= {"k_proj": kv, "v_proj": kv}
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
        self.q_norm: HeadNorm | UnitNorm | None = None
        self.k_norm: HeadNorm | UnitNorm | None = None
        if shape.qk_norm == "unit":
            assert device is not None
            self.q_norm = self.k_norm = UnitNorm(total.dim, dtype, device)
        elif shape.qk_norm is not None:
            kind = torch.float32 if shape.float32_norms else dtype
            self.q_norm = _head_norm(shape, q, kind)
            self.k_norm = None if shape.shares_kv else _head_norm(shape, kv, kind)
        self.v_norm: UnitNorm | None = None
        if shape.value_norm and not shape.shares_kv:
            assert device is not None
            self.v_norm = UnitNorm(total.dim, dtype, device)
        self.rows = Shard.even(total.num_q, group)
        self.sinks = None
        if shape.sinks:
            sinks = torch.empty(self.rows.count, dtype=torch.float32)
            self.sinks = nn.Parameter(sinks, requires_grad=False)
        self._options = AttentionOptions(
            scale=total.dim**-0.5 if shape.scale is None else shape.scale,
            window=shape.window,
            soft_cap=shape.soft_cap,
            chunked=shape.chunked,
        )

    def _attended(self, x: Inputs, batch: StepBatch, cos_sin: Tensor | None) -> Tensor:
        """The heads' outputs of all tokens; writes their keys and values."""
        kv = batch.kv_of(self.index)
        qkv, gates = self.qkv_proj.raw(batch.all_tokens(x), batch.adapters), None
        if self.shape.gated:
            qkv, gates = self.ops.split_gates(_scaled(qkv), self.heads)
        if self.shape.qk_norm == "whole":
            qkv = self._normalise_whole(qkv)
        if self.shape.growth is not None:
            qkv = self._scaled_queries(qkv, self.shape.growth.of(batch.positions))
        if self.v_norm is not None:
            weight, eps = self.v_norm.weight, self.shape.norm_eps
            qkv = self.ops.value_norm(_scaled(qkv), self.heads, weight, eps)
        options = replace(self._options, sinks=self.sinks)
        rope = RopeOptions(
            cos_sin=cos_sin if self.shape.rope else None,
            interleaved=self.shape.interleaved,
            norms=self._norms,
        )
        if self.shape.shares_kv:
            queries = self.ops.rotate_queries(_scaled(qkv), self.heads, rope, batch)
            attended = self.ops.attend_queries(queries, kv, batch, options).flatten(1)
        else:
            attended = self.ops.attend(qkv, self.heads, rope, kv, batch, options).flatten(1)
        return attended if gates is None else self.ops.sigmoid_gate(attended, gates)

    @property
    def _norms(self) -> QKNorms | None:
        """The norms that the kernels apply to each head."""
        if self.q_norm is None or self.shape.qk_norm == "whole":
            return None
        return QKNorms(
            q=self.q_norm.weight,
            k=(self.k_norm or self.q_norm).weight,  # without keys there is no norm of them
            eps=self.shape.norm_eps,
            kind=self.shape.norm_kind,
        )

    def _scaled_queries(self, qkv: Outputs, factors: Tensor) -> Tensor:
        """Multiply the query heads of each token by its factor; rotations do not change lengths."""
        q, kv = _scaled(qkv).split(
            [n * self.heads.dim for n in (self.heads.num_q, 2 * self.heads.num_kv)], -1
        )
        return torch.cat([q * factors[:, None].to(q.dtype), kv], dim=-1)

    def _normalise_whole(self, qkv: Outputs) -> Tensor:
        """Normalise q and k over the heads of all ranks; replicated kv heads count once."""
        qkv = _scaled(qkv)
        assert self.q_norm is not None
        assert self.k_norm is not None
        weights, eps = (self.q_norm.weight, self.k_norm.weight), self.shape.norm_eps
        num_q, num_kv, dim = self.heads.num_q, self.heads.num_kv, self.heads.dim
        if self.group.size == 1:
            return self.ops.qk_norm(qkv, *weights, eps)
        *parts, v = qkv.split([num_q * dim, num_kv * dim, num_kv * dim], dim=-1)
        squares = torch.cat([x.float().square().mean(-1, keepdim=True) for x in parts], dim=-1)
        # All ranks hold equally many heads of each part, so the mean of their means is the whole mean.
        means = self.group.all_reduce(squares) / self.group.size
        normed = [
            weight * (x.float() * torch.rsqrt(mean + eps)).to(x.dtype)
            for x, weight, mean in zip(parts, weights, means.split(1, dim=-1), strict=True)
        ]
        return torch.cat([*normed, v], dim=-1)


def _scaled(y: Outputs) -> Tensor:
    return y.scaled() if isinstance(y, UnscaledOutputs) else y


def _head_norm(shape: AttentionShape, features: Shard, dtype: torch.dtype) -> HeadNorm:
    """The weight of the norm of q or k, of which this rank has `features`."""
    dim = shape.heads.dim
    if shape.qk_norm == "head":
        return HeadNorm(Shard(dim), dtype)
    if shape.qk_norm == "whole":
        assert shape.norm_kind == "rms"
        return HeadNorm(features, dtype)
    heads = replace(features, whole=features.whole // dim, unit=1)
    return HeadNorm(heads, dtype, (dim,))
