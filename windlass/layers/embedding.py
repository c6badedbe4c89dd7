"""Token embeddings, from their own table or from a tied head's packed weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from windlass.kernels.ops import Ops
from windlass.kernels.prepared import RowReader
from windlass.layers.linear import Linear
from windlass.layers.stored import StoredWeight
from windlass.quant.base import LinearMethod


class Embedding(nn.Module):
    """Looks up a row of the table for each token."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        table = torch.empty(vocab_size, hidden_size, dtype=dtype)
        self.weight = nn.Parameter(table, requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.ops.embedding(ids, self.weight)


class TiedEmbedding(nn.Module):
    """Reads rows of the head's packed weight, so that a tied table is in memory once."""

    def __init__(self, head: Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self._head = (head,)  # a tuple, so that nn.Module does not register it as a submodule
        self._dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        return _rows(self._head[0], ids, self._dtype)


class PackedEmbedding(StoredWeight):
    """Embedding that stays quantised. Its method must support reading rows."""

    def __init__(
        self, vocab_size: int, hidden_size: int, method: LinearMethod, dtype: torch.dtype
    ) -> None:
        super().__init__({"embed_tokens": vocab_size}, hidden_size, method)
        self._dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        return _rows(self, ids, self._dtype)


def _rows(weight: StoredWeight, ids: Tensor, dtype: torch.dtype) -> Tensor:
    (gemm,) = weight.gemms
    assert isinstance(gemm.prepared, RowReader)
    return gemm.prepared.rows(ids, dtype)
