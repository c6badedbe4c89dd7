"""Token embeddings, from their own table or from a tied head's packed weight.

A rank holds the rows of some tokens. It gives zeros for the others, and the ranks' rows are summed. If the
tokens of a step are split, each rank gets the embeddings of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from windlass.kernels.ops import Ops
from windlass.kernels.prepared import RowReader
from windlass.kernels.token_split import TokenSplit
from windlass.layers.head import Head, vocab_shard
from windlass.layers.stored import ShardedRows, StoredWeight
from windlass.parallel.mesh import Group
from windlass.quant.base import LinearMethod
from windlass.quant.shard import Shard


class Embedding(ShardedRows):
    """Looks up a row of the table for each token."""

    def __init__(
        self, vocab_size: int, hidden_size: int, dtype: torch.dtype, ops: Ops, group: Group
    ) -> None:
        super().__init__()
        self.ops = ops
        self.group = group
        self.rows = vocab_shard(vocab_size, group)
        table = torch.empty(self.rows.count, hidden_size, dtype=dtype)
        self.weight = nn.Parameter(table, requires_grad=False)

    def forward(self, ids: Tensor, split: TokenSplit | None = None) -> Tensor:
        if self.rows.is_whole:
            return self.ops.embedding(ids if split is None else split.own(ids), self.weight)
        return _sum(self.group, self.ops.embedding(ids, self.weight, self.rows.start), split)


class TiedEmbedding(nn.Module):
    """Reads rows of the head's packed weight, so that a tied table is in memory once."""

    def __init__(self, head: Head, dtype: torch.dtype) -> None:
        super().__init__()
        self._head = (head,)  # a tuple, so that nn.Module does not register it as a submodule
        self._dtype = dtype

    def forward(self, ids: Tensor, split: TokenSplit | None = None) -> Tensor:
        (head,) = self._head
        return _packed_rows(head, head.group, ids, self._dtype, split)


class PackedEmbedding(StoredWeight):
    """Embedding that stays quantised. Its method must support reading rows."""

    multiplied = False

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        method: LinearMethod,
        dtype: torch.dtype,
        group: Group,
    ) -> None:
        rows = vocab_shard(
            vocab_size, group, method.params("embed_tokens", vocab_size, hidden_size)
        )
        super().__init__({"embed_tokens": rows}, Shard(hidden_size), method)
        self._dtype = dtype
        self._group = group

    def forward(self, ids: Tensor, split: TokenSplit | None = None) -> Tensor:
        return _packed_rows(self, self._group, ids, self._dtype, split)


def _sum(group: Group, x: Tensor, split: TokenSplit | None) -> Tensor:
    return group.all_reduce(x) if split is None else split.reduce_scatter(x)


def _packed_rows(
    weight: StoredWeight,
    group: Group,
    ids: Tensor,
    dtype: torch.dtype,
    split: TokenSplit | None,
) -> Tensor:
    (gemm,), (rows,) = weight.gemms, weight.outputs.values()
    reader = gemm.prepared
    assert isinstance(reader, RowReader)
    if rows.is_whole:
        return reader.rows(ids if split is None else split.own(ids), dtype)
    return _sum(group, reader.rows(ids, dtype, rows.start), split)
