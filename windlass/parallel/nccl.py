"""A process group of ranks with a GPU each, over NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

# A rank that died is noticed by its closed link long before.
_TIMEOUT = timedelta(minutes=30)


class NcclGroup:
    """Ranks whose collectives run on the current stream, and are captured with it.

    NCCL chooses an order of summation by the size of a tensor, so with more than two ranks a row's
    result may depend on its batch. All ranks get the same bits.
    """

    def __init__(self, store: c10d.Store, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        settings = c10d.ProcessGroupNCCL.Options()
        settings._timeout = _TIMEOUT
        self._backend: Any = c10d.ProcessGroupNCCL(store, rank, size, settings)
        self._backend.eager_connect_single_device(device)
        self._reduce, self._gather = c10d.AllreduceOptions(), c10d.AllgatherOptions()
        self._exchange = c10d.AllToAllOptions()
        for options in (self._reduce, self._gather, self._exchange):
            options.asyncOp = False  # on the current stream, not on NCCL's own

    def all_reduce(self, x: Tensor) -> Tensor:
        total = x.contiguous().clone()
        self._backend.allreduce([total], self._reduce)
        return total

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        widest = max(widths)
        own = torch.nn.functional.pad(x, (0, widest - x.shape[-1])).contiguous()
        found = own.new_empty((self.size, *own.shape))
        self._backend._allgather_base(found, own, self._gather)
        parts = [part[..., :width] for part, width in zip(found, widths, strict=True)]
        return torch.cat(parts, dim=-1)

    def all_to_all(self, x: Tensor, *, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        found = x.new_empty((sum(received), *x.shape[1:]))
        sizes = (list(received), list(sent))
        self._backend.alltoall_base(found, x.contiguous(), *sizes, self._exchange)
        return found
