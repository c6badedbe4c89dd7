"""The gated delta net: a gated delta rule, whose outputs are normalised in each head."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.kernels.batch import LayerState, StepBatch
from windlass.kernels.delta import DeltaWeights
from windlass.kernels.ops import Ops
from windlass.layers.linear import MethodFor
from windlass.layers.norm import HeadNorm
from windlass.layers.recurrent import HeadShards, RecurrentMixer, RecurrentShape
from windlass.parallel.mesh import Group
from windlass.quant.shard import Shard


class DeltaNet(RecurrentMixer):
    """Input projection, causal convolution, gated delta rule with norm and gate, output projection."""

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
            "v_proj": shards.inner,
            "k_proj": shards.shared,
            "q_proj": shards.shared,
            "beta_proj": shards.by_head,
            "dt_proj": shards.by_head,
        }
        super().__init__(
            *(index, shape, method_for, ops, group, dtype), outputs=outputs, channels="vkq"
        )
        self.norm = HeadNorm(Shard(shape.heads.dim), torch.float32)

    def _recurrence(
        self, projected: Tensor, mixed: Tensor, state: LayerState, batch: StepBatch
    ) -> Tensor:
        weights = DeltaWeights(
            decay=self.A, dt_bias=self.dt_bias, norm=self.norm.weight, eps=self.norm_eps
        )
        return self.ops.delta_rule(projected, mixed, weights, self.heads, state, batch)
