"""The gated short convolution: a causal convolution between two products with gates."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.kernels.batch import LayerState, StepBatch
from windlass.kernels.ops import Ops
from windlass.layers.linear import MethodFor
from windlass.layers.recurrent import ConvMixer, RecurrentShape
from windlass.parallel.mesh import Group
from windlass.quant.shard import Shard


class ShortConv(ConvMixer):
    """Input projection to b, c and x, c * convolution of b * x, and output projection."""

    def __init__(
        self,
        index: int,
        shape: RecurrentShape,
        method_for: MethodFor,
        ops: Ops,
        group: Group,
        dtype: torch.dtype,
    ) -> None:
        inner = Shard.even(shape.heads.channels, group)
        super().__init__(
            *(index, shape, method_for, ops, group, dtype),
            outputs=dict.fromkeys(("b_proj", "c_proj", "x_proj"), inner),
            channels="x",
            inner=inner,
        )

    def _mixed(self, projected: Tensor, state: LayerState, batch: StepBatch) -> Tensor:
        conv = self.conv1d
        return self.ops.short_conv(projected, conv.weight, conv.bias, self.heads, state, batch)
