"""Token ids to vectors, and vectors to logits over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from windlass.kernels.native.linear import NativeProduct
from windlass.kernels.ops import Ops
from windlass.layers.linear import Linear


class Embedding(nn.Module):
    """A row of the table for each token."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        table = torch.empty(vocab_size, hidden_size, dtype=dtype)
        self.weight = nn.Parameter(table, requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.ops.embedding(ids, self.weight)


class HeadRows(nn.Module):
    """Rows of the head's own packed weight, so that a tied table is in memory once."""

    def __init__(self, head: Linear) -> None:
        super().__init__()
        self._head = (head,)  # a tuple: it is no part of this module

    def forward(self, ids: Tensor) -> Tensor:
        held = self._head[0].products[0].prepared
        assert isinstance(held, NativeProduct)
        return held.rows(ids)
