"""Token ids to vectors, and vectors to logits over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from windlass.kernels.ops import Ops


class Embedding(nn.Module):
    """A row of the table for each token."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        table = torch.empty(vocab_size, hidden_size, dtype=dtype)
        self.weight = nn.Parameter(table, requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.ops.embedding(ids, self.weight)
