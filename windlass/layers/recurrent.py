"""What mixers with states share: projections, the causal convolution, and which heads a rank computes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from windlass.core.recurrent import RecurrentHeads
from windlass.kernels.batch import LayerState, StepBatch
from windlass.kernels.gemm_io import Inputs
from windlass.kernels.ops import Ops
from windlass.layers.attention import AttentionLayer
from windlass.layers.linear import Linear, MethodFor
from windlass.layers.stored import ShardedRows, StoredWeight
from windlass.parallel.mesh import Group
from windlass.quant.shard import Shard
from windlass.quant.unquantised import Unquantised


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentShape:
    """Sizes and options of one recurrent layer."""

    hidden_size: int
    heads: RecurrentHeads
    norm_eps: float
    norm_groups: int = (
        1  # parts of the heads' outputs that are normalised alone; 0: there is no norm
    )
    conv_bias: bool = True
    proj_bias: bool = False


@dataclass(frozen=True, slots=True)
class HeadShards:
    """A rank's features of all heads, its heads, and its features of keys or queries."""

    inner: Shard
    by_head: Shard
    shared: Shard

    @classmethod
    def of(cls, heads: RecurrentHeads, group: Group) -> HeadShards:
        """Heads are divided, and groups of keys and queries if there are enough.

        Else neighbouring ranks hold the same group. Every rank has all groups of tiled heads.
        """
        features, unit = heads.group_features, heads.state_size
        return cls(
            inner=Shard.even(heads.inner, group, unit=heads.dim * _least_heads(heads, group)),
            by_head=Shard.even(heads.num_heads, group, unit=_least_heads(heads, group)),
            shared=Shard(features) if heads.tiled else Shard.replicated(features, group, unit=unit),
        )


def _least_heads(heads: RecurrentHeads, group: Group) -> int:
    """The heads that one rank must have together: one head of each group, if they are tiled."""
    return heads.num_groups if heads.tiled and group.size > 1 else 1


def rank_recurrent_heads(heads: RecurrentHeads, group: Group) -> RecurrentHeads:
    """The heads, and the groups of keys and queries, that this rank computes."""
    if not heads.num_groups:
        return replace(heads, num_heads=Shard.even(heads.num_heads, group).count)
    shards = HeadShards.of(heads, group)
    groups = shards.shared.count // heads.state_size
    return replace(heads, num_heads=shards.by_head.count, num_groups=groups)


class ConvMixer(AttentionLayer):
    """Input projection, causal convolution, and output projection.

    The output is added to the residual stream and normalised by the next norm. Ranks split the heads.
    `outputs` are the parts of the input projection, of which `channels` go through the convolution, and
    `inner` are the inputs of the output projection.
    """

    def __init__(
        self,
        index: int,
        shape: RecurrentShape,
        method_for: MethodFor,
        ops: Ops,
        group: Group,
        dtype: torch.dtype,
        *,
        outputs: dict[str, Shard],
        channels: Iterable[str],
        inner: Shard,
    ) -> None:
        super().__init__()
        self.index, self.ops, self.group = index, ops, group
        self.heads = rank_recurrent_heads(shape.heads, group)
        hidden = Shard(shape.hidden_size)
        bias = dtype if shape.proj_bias else None
        self.in_proj = Linear(
            outputs=outputs, inputs=hidden, method=method_for(outputs), group=group, bias=bias
        )
        self.conv1d = StoredWeight(
            outputs={f"{name}_conv": outputs[f"{name}_proj"] for name in channels},
            inputs=Shard(shape.heads.conv_size),
            method=Unquantised(torch.float32),
        )
        if shape.conv_bias:
            bias_values = torch.empty(self.heads.channels, dtype=torch.float32)
            self.conv1d.bias = nn.Parameter(bias_values, requires_grad=False)
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
        """The inputs of the output projection; writes the states."""
        del cos_sin
        projected = self.in_proj(batch.all_tokens(x), batch.adapters)
        return self._mixed(projected, batch.state_of(self.index), batch)

    @abstractmethod
    def _mixed(self, projected: Tensor, state: LayerState, batch: StepBatch) -> Tensor:
        """The inputs of the output projection, from the outputs of the input projection."""


class RecurrentMixer(ConvMixer, ShardedRows):
    """A recurrence after the convolution.

    `outputs` has the gate, the `channels` and numbers per head.
    """

    def __init__(
        self,
        index: int,
        shape: RecurrentShape,
        method_for: MethodFor,
        ops: Ops,
        group: Group,
        dtype: torch.dtype,
        *,
        outputs: dict[str, Shard],
        channels: Iterable[str],
    ) -> None:
        shards = HeadShards.of(shape.heads, group)
        super().__init__(
            *(index, shape, method_for, ops, group, dtype),
            outputs=outputs,
            channels=channels,
            inner=shards.inner,
        )
        self.rows = shards.by_head
        self.A, self.dt_bias = self._per_head(), self._per_head()
        self.norm_eps = shape.norm_eps

    def _per_head(self) -> nn.Parameter:
        return nn.Parameter(torch.empty(self.rows.count, dtype=torch.float32), requires_grad=False)

    def _mixed(self, projected: Tensor, state: LayerState, batch: StepBatch) -> Tensor:
        conv = self.conv1d
        mixed = self.ops.causal_conv(projected, conv.weight, conv.bias, self.heads, state, batch)
        return self._recurrence(projected, mixed, state, batch)

    @abstractmethod
    def _recurrence(
        self, projected: Tensor, mixed: Tensor, state: LayerState, batch: StepBatch
    ) -> Tensor:
        """The outputs of the heads, from those of the input projection and of the convolution."""
