"""Token ids to vectors, and vectors to logits over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Embedding(nn.Module):
    """A row of the table for each token."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        table = torch.empty(vocab_size, hidden_size, dtype=dtype)
        self.weight = nn.Parameter(table, requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight)
