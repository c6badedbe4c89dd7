"""The Mamba-2 mixer: a selective scan, whose outputs are normalised over all heads or over groups of them."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.errors import ShardError
from windlass.kernels.batch import LayerState, StepBatch
from windlass.kernels.mamba import ScanWeights
from windlass.kernels.ops import Ops
from windlass.layers.linear import MethodFor
from windlass.layers.norm import HeadNorm
from windlass.layers.recurrent import HeadShards, RecurrentMixer, RecurrentShape
from windlass.parallel.mesh import Group


class Mamba(RecurrentMixer):
    """Input projection, causal convolution, selective scan, gated norm and output projection."""

    def __init__(
        self,
        index: int,
        shape: RecurrentShape,
        method_for: MethodFor,
        ops: Ops,
        group: Group,
        dtype: torch.dtype,
    ) -> None:
        shards = HeadShards.of(shape.heads, group)
        outputs = {
            "gate_proj": shards.inner,
            "x_proj": shards.inner,
            "b_proj": shards.shared,
            "c_proj": shards.shared,
            "dt_proj": shards.by_head,
        }
        super().__init__(
            *(index, shape, method_for, ops, group, dtype), outputs=outputs, channels="xbc"
        )
        self.D = self._per_head()
        self._norm_groups = _rank_groups(shape.norm_groups, group)
        self.norm = HeadNorm(shards.inner, dtype) if shape.norm_groups else None

    def _recurrence(
        self, projected: Tensor, mixed: Tensor, state: LayerState, batch: StepBatch
    ) -> Tensor:
        weights = ScanWeights(decay=self.A, skip=self.D, dt_bias=self.dt_bias)
        y = self.ops.selective_scan(projected, mixed, weights, self.heads, state, batch)
        return y if self.norm is None else self._normalised(y, self.norm.weight)

    def _normalised(self, y: Tensor, weight: Tensor) -> Tensor:
        """Normalise over this rank's groups of heads, or over the heads of all ranks."""
        size = self.group.size
        if self._norm_groups > 1:
            return self.ops.rms_norm(y, weight, self.norm_eps, groups=self._norm_groups)
        if self._norm_groups or size == 1:
            return self.ops.rms_norm(y, weight, self.norm_eps)
        wide = y.float()
        # All ranks hold equally many heads, so the mean of their means is the whole mean.
        mean = self.group.all_reduce(wide.square().mean(-1, keepdim=True)) / size
        return weight * (wide * torch.rsqrt(mean + self.norm_eps)).to(weight.dtype)


def _rank_groups(groups: int, group: Group) -> int:
    """The groups of the norm that this rank has whole; 0: one group has the heads of all ranks."""
    if groups % group.size and groups > 1:
        raise ShardError(
            f"the {groups} groups of a Mamba-2 norm cannot be divided among {group.size} ranks; use a "
            f"divisor of {groups}."
        )
    return groups // group.size
