"""The LM head, and how ranks divide a vocabulary.

Vocabularies have any size, so the ranks' rows are uneven: whole units of 16 rows, or of the format's
own unit, and the last rank's last unit may be partial. Nothing is padded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from windlass.kernels.batch import AdapterRows
from windlass.kernels.gemm_io import Inputs
from windlass.layers.linear import Linear
from windlass.parallel.mesh import Group
from windlass.quant.base import LinearMethod, ParamSpec
from windlass.quant.shard import Shard

_UNIT = 16  # rows


def vocab_shard(
    vocab_size: int, group: Group, params: Mapping[str, ParamSpec] | None = None
) -> Shard:
    """This rank's tokens. The stored tensors, `params`, may need units of more rows."""
    units = [spec.out.unit for spec in (params or {}).values() if spec.out is not None]
    return Shard.uneven(vocab_size, group, unit=math.lcm(_UNIT, *units))


class Head(Linear):
    """Logits of the whole vocabulary: each rank computes those of its tokens."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        method: LinearMethod,
        group: Group,
        bias: torch.dtype | None = None,
    ) -> None:
        """`name` is the checkpoint module of the weight."""
        rows = vocab_shard(vocab_size, group, method.params(name, vocab_size, hidden_size))
        super().__init__({name: rows}, Shard(hidden_size), method, group, bias)
        self._widths = rows.counts

    def forward(self, x: Inputs, adapters: AdapterRows | None = None) -> Tensor:
        return self.group.all_gather(super().forward(x, adapters), self._widths)
