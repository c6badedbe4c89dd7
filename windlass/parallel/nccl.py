"""Process groups of ranks with a GPU each: over NCCL, and memory that all of them can read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from windlass.parallel.mesh import Sending

# A rank that died is noticed by its closed link long before.
_TIMEOUT = timedelta(minutes=30)
_TAG = 0  # of tensors that one rank sends to another


class NcclGroup:
    """Ranks whose collectives run on the current stream, and are captured with it.

    NCCL chooses an order of summation by the size of a tensor, so with more than two ranks a row's
    result may depend on its batch. All ranks get the same bits. Tensors that one rank sends to another
    travel on a stream of their own, in order, and receiving them orders the current stream behind it.
    """

    def __init__(
        self, store: c10d.Store, rank: int, size: int, device: torch.device | None = None
    ) -> None:
        """`device`: connect all ranks now. None: each pair connects when it first exchanges a tensor."""
        self.rank = rank
        self.size = size
        settings = c10d.ProcessGroupNCCL.Options()
        settings._timeout = _TIMEOUT
        self._backend: Any = c10d.ProcessGroupNCCL(store, rank, size, settings)
        if device is not None:
            self._backend.eager_connect_single_device(device)
        self._reduce, self._gather = c10d.AllreduceOptions(), c10d.AllgatherOptions()
        self._exchange, self._scatter = c10d.AllToAllOptions(), c10d.ReduceScatterOptions()
        for options in (self._reduce, self._scatter, self._gather, self._exchange):
            options.asyncOp = False  # on the current stream, not on NCCL's own

    def all_reduce(self, x: Tensor) -> Tensor:
        total = x.contiguous().clone()
        self._backend.allreduce([total], self._reduce)
        return total

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        most = max(counts)
        padding = self.size * most - len(x)  # at the end, since only the last rank may have fewer
        padded = torch.nn.functional.pad(x, (0, 0, 0, padding)) if padding else x
        found = x.new_empty((most, *x.shape[1:]))
        self._backend._reduce_scatter_base(found, padded.contiguous(), self._scatter)
        return found[: counts[self.rank]]

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        widest = max(widths)
        own = torch.nn.functional.pad(x, (0, widest - x.shape[-1])).contiguous()
        found = own.new_empty((self.size, *own.shape))
        self._backend._allgather_base(found, own, self._gather)
        if x.ndim == 1 and min(widths[:-1], default=widest) == widest:  # already one after another
            return found.flatten()[: sum(widths)]
        parts = [part[..., :width] for part, width in zip(found, widths, strict=True)]
        return torch.cat(parts, dim=-1)

    def all_to_all(self, x: Tensor, *, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        found = x.new_empty((sum(received), *x.shape[1:]))
        sizes = (list(received), list(sent))
        self._backend.alltoall_base(found, x.contiguous(), *sizes, self._exchange)
        return found

    def send(self, x: Tensor, to: int) -> Sending:
        own = x.contiguous()
        return _Sent(self._backend.send([own], to, _TAG), own)

    def receive(self, into: Tensor, source: int) -> None:
        self._backend.recv([into], source, _TAG).wait()  # the stream waits, not the host

    def abort(self) -> None:
        """End what waits for other ranks; the group cannot be used any more."""
        self._backend.abort()


@dataclass(frozen=True, slots=True)
class _Sent:
    """A tensor on its way, which must not be freed before."""

    work: Any
    tensor: Tensor

    def wait(self) -> None:
        self.work.wait()  # the stream waits, not the host


@dataclass(frozen=True, slots=True)
class SymmetricMemory:
    """A buffer of this rank that all GPUs of its group can read and write, and those of the others."""

    buffer: Tensor
    addresses: tuple[int, ...]  # of the buffers of all ranks, in this process
    owners: tuple[Any, ...]  # keep the buffers of the others mapped


def share_memory(
    store: c10d.Store, rank: int, size: int, *, device: torch.device, num_bytes: int, name: str
) -> SymmetricMemory:
    """Allocate symmetric memory, all zeros. All ranks call this, and it returns when all have.

    `name`: of the group, which no other group of this process has.
    """
    memory, group = c10d._SymmetricMemory, c10d.ProcessGroup(store, rank, size)
    register: Any = c10d._register_process_group
    register(name, group)  # where the rendezvous looks for it
    buffer = memory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device, name)
    buffer.zero_()
    handle: Any = memory.rendezvous(buffer)
    handle.barrier()  # all buffers are zero
    torch.cuda.synchronize(device)
    return SymmetricMemory(buffer, tuple(handle.buffer_ptrs), (handle, group))


def why_unreachable(device: torch.device, gpus: range) -> str | None:
    """Why this GPU cannot read the memory of all these GPUs; None: it can."""
    for other in gpus:
        if other != device.index and not torch.cuda.can_device_access_peer(device, other):
            return f"GPU {device.index} cannot read the memory of GPU {other}"
    return None
