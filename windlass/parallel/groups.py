"""Process groups over torch.distributed, and the mesh of a rank.

Groups are objects of their own: torch's default group, of which a process has one, stays unused.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from windlass.parallel.mesh import Group, Mesh, PeerGroup, Sending, SingleRank
from windlass.parallel.place import Place

# A rank that died is noticed by its closed link long before.
_TIMEOUT = timedelta(minutes=30)
_TAG = 0  # of tensors that one rank sends to another


class GlooGroup:
    """Ranks that exchange tensors in host memory through sockets.

    A sum is computed on every rank, in the order of the ranks, so that a row's result does not depend
    on its place in a batch.
    """

    def __init__(self, backend: c10d.ProcessGroupGloo) -> None:
        self._backend = backend
        self.rank: int = backend.rank()
        self.size: int = backend.size()

    def all_reduce(self, x: Tensor) -> Tensor:
        first, *others = self._exchange(x)
        total = first.float()
        for other in others:
            total += other
        return total.to(x.device, x.dtype)

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        widest = max(widths)
        padded = torch.nn.functional.pad(x, (0, widest - x.shape[-1]))
        found = self._exchange(padded)
        parts = [part[..., :width] for part, width in zip(found, widths, strict=True)]
        return torch.cat(parts, dim=-1).to(x.device)

    def all_to_all(self, x: Tensor, *, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        own = x.detach().cpu().contiguous()
        found = own.new_empty((sum(received), *own.shape[1:]))
        options = c10d.AllToAllOptions()
        flat = [part.view(torch.uint8) for part in (found, own)]
        exchange = self._backend.alltoall_base  # type: ignore[attr-defined]
        exchange(*flat, list(received), list(sent), options).wait()
        return found.to(x.device)

    def send(self, x: Tensor, to: int) -> Sending:
        host = x.detach().cpu().contiguous()
        return self._backend.send([_bytes(host)], to, _TAG)  # type: ignore[attr-defined]

    def receive(self, into: Tensor, source: int) -> None:
        host = into if into.device.type == "cpu" else torch.empty_like(into, device="cpu")
        self._backend.recv([_bytes(host)], source, _TAG).wait()  # type: ignore[attr-defined]
        if host is not into:
            into.copy_(host)

    def _exchange(self, x: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which have the same shape, in host memory."""
        own = x.detach().cpu().contiguous()
        found = [torch.empty_like(own) for _ in range(self.size)]
        flat = [_bytes(part) for part in (own, *found)]
        self._backend.allgather([flat[1:]], [flat[0]]).wait()  # type: ignore[attr-defined]
        return found


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def least(group: Group, value: int) -> int:
    """The smallest of all ranks' values."""
    every = group.all_gather(torch.tensor([value], dtype=torch.int64), [1] * group.size)
    return int(every.min())


def connect(place: Place) -> Mesh:
    """Make the groups of a rank. All ranks call this, and it returns when all have."""
    rank, tp, size = place.rank, place.parallel.tensor_parallel_size, place.parallel.num_ranks
    store = _store(place)

    def group(name: str, members: Sequence[int]) -> PeerGroup:
        if len(members) == 1:
            return SingleRank()
        own = c10d.PrefixStore(name, store)
        backend = c10d.ProcessGroupGloo(own, members.index(rank), len(members), timeout=_TIMEOUT)
        return GlooGroup(backend)

    def connect_gpus(device: torch.device) -> Group:
        from windlass.parallel.nccl import NcclGroup

        return NcclGroup(c10d.PrefixStore(f"nccl-{stage}", store), column, tp, device)

    only_gloo = place.parallel.distributed_backend == "gloo"
    stage, column = divmod(rank, tp)
    sharing = group(f"tp-{stage}", range(stage * tp, (stage + 1) * tp))
    return Mesh(
        tp=sharing,
        pp=group(f"pp-{column}", range(column, size, tp)),
        ep=sharing if place.parallel.enable_expert_parallel else SingleRank(),
        world=group("world", range(size)),
        connect_gpus=None if only_gloo else connect_gpus,
        exchange=None if only_gloo else place.exchange,
    )


def _store(place: Place) -> c10d.Store:
    """Where the ranks find each other: a file on one machine, else the first machine's port."""
    parallel = place.parallel
    if place.store_file is not None:
        return c10d.FileStore(place.store_file, parallel.num_ranks)
    return c10d.TCPStore(
        parallel.master_addr,
        parallel.master_port,
        parallel.num_ranks,
        is_master=place.rank == 0,
        timeout=_TIMEOUT,
    )
