"""The Mamba-2 mixer: a gated linear recurrence, whose state is kept in pages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from windlass.core.mamba import MambaHeads
from windlass.kernels.batch import StepBatch
from windlass.kernels.gemm_io import Inputs
from windlass.kernels.mamba import ScanWeights
from windlass.kernels.ops import Ops
from windlass.layers.attention import AttentionLayer
from windlass.layers.linear import Linear, MethodFor
from windlass.layers.norm import HeadNorm
from windlass.layers.stored import ShardedRows, StoredWeight
from windlass.parallel.mesh import Group
from windlass.quant.shard import Shard
from windlass.quant.unquantised import Unquantised


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaShape:
    """Sizes and options of one Mamba-2 layer."""

    hidden_size: int
    heads: MambaHeads
    norm_eps: float
    conv_bias: bool = True
    proj_bias: bool = False


def rank_mamba_heads(heads: MambaHeads, group: Group) -> MambaHeads:
    """The heads and the groups of B and C that this rank computes."""
    count = Shard.even(heads.num_heads, group).count
    groups = Shard.replicated(heads.num_groups, group, unit=1).count
    return replace(heads, num_heads=count, num_groups=groups)


class Mamba(AttentionLayer, ShardedRows):
    """Input projection, causal convolution, selective scan, gated norm and output projection.

    The output is added to the residual stream and normalised by the next norm. Ranks split the heads,
    and the groups of B and C if there are enough; else neighbouring ranks hold the same group.
    """

    def __init__(
        self,
        index: int,
        shape: MambaShape,
        method_for: MethodFor,
        ops: Ops,
        group: Group,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.index, self.ops, self.group = index, ops, group
        total, hidden = shape.heads, Shard(shape.hidden_size)
        by_head = Shard.even(total.num_heads, group)
        inner = Shard.even(total.inner, group, unit=total.dim)
        shared = Shard.replicated(total.group_features, group, unit=total.state_size)
        self.heads = rank_mamba_heads(total, group)
        bias = dtype if shape.proj_bias else None
        outputs = {
            "gate_proj": inner,
            "x_proj": inner,
            "b_proj": shared,
            "c_proj": shared,
            "dt_proj": by_head,
        }
        self.in_proj = Linear(
            outputs=outputs, inputs=hidden, method=method_for(outputs), group=group, bias=bias
        )
        self.conv1d = StoredWeight(
            outputs={"x_conv": inner, "b_conv": shared, "c_conv": shared},
            inputs=Shard(total.conv_size),
            method=Unquantised(torch.float32),
        )
        if shape.conv_bias:
            channels = torch.empty(self.heads.channels, dtype=torch.float32)
            self.conv1d.bias = nn.Parameter(channels, requires_grad=False)
        self.rows = by_head
        self.A, self.D, self.dt_bias = (
            nn.Parameter(torch.empty(by_head.count, dtype=torch.float32), requires_grad=False)
            for _ in range(3)
        )
        self.norm = HeadNorm(inner, dtype)
        self.norm_eps = shape.norm_eps
        self.o_proj = Linear(
            outputs={"out_proj": hidden},
            inputs=inner,
            method=method_for(["out_proj"]),
            group=group,
            bias=bias,
        )

    @property
    def first_proj(self) -> Linear:
        return self.in_proj

    def _attended(self, x: Inputs, batch: StepBatch, cos_sin: Tensor | None) -> Tensor:
        """The normalised outputs of the heads; writes their states."""
        del cos_sin
        state, conv = batch.state_of(self.index), self.conv1d
        projected = self.in_proj(batch.all_tokens(x), batch.adapters)
        mixed = self.ops.causal_conv(projected, conv.weight, conv.bias, self.heads, state, batch)
        weights = ScanWeights(decay=self.A, skip=self.D, dt_bias=self.dt_bias)
        y = self.ops.selective_scan(projected, mixed, weights, self.heads, state, batch)
        return self._normalised(y)

    def _normalised(self, y: Tensor) -> Tensor:
        """Normalise over the heads of all ranks."""
        weight, size = self.norm.weight, self.group.size
        if size == 1:
            return self.ops.rms_norm(y, weight, self.norm_eps)
        wide = y.float()
        # All ranks hold equally many heads, so the mean of their means is the whole mean.
        mean = self.group.all_reduce(wide.square().mean(-1, keepdim=True)) / size
        return weight * (wide * torch.rsqrt(mean + self.norm_eps)).to(weight.dtype)
