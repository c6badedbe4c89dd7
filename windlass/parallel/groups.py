"""Process groups over torch.distributed, and the mesh of a rank.

Groups are objects of their own: torch's default group, of which a process has one, stays unused.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from windlass.parallel.mesh import (
    GpuGroups,
    Group,
    Mesh,
    PeerGroup,
    Sending,
    SingleRank,
    SymmetricMemory,
)
from windlass.parallel.place import Place, StoreFile

# A rank that died is noticed by its closed link long before.
_TIMEOUT = timedelta(minutes=30)
_LOOPBACK = "127.0.0.1"
_GLOO_THREADS = 2  # torch's own default
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
        return _total(self._exchange(x)).to(x.device, x.dtype)

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        own = counts[self.rank]
        found = self.all_to_all(x.detach().cpu(), sent=counts, received=[own] * self.size)
        return _total(found.split(own)).to(x.device, x.dtype)

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


def _total(summands: Sequence[Tensor]) -> Tensor:
    first, *others = summands
    total = first.float()
    for other in others:
        total += other
    return total


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def least(group: Group, value: int) -> int:
    """The smallest of all ranks' values."""
    return min(_every(group, value))


def first_numbers(
    group: Group, own: Sequence[int], *, device: torch.device | None = None
) -> list[int]:
    """The numbers of the group's first rank. All ranks call this with their own."""
    counts = _every(group, len(own), device)
    if not any(counts):
        return []
    numbers = torch.tensor(own, dtype=torch.int64, device=device)
    return [int(each) for each in group.all_gather(numbers, counts)[: counts[0]].tolist()]


def _every(group: Group, value: int, device: torch.device | None = None) -> list[int]:
    own = torch.tensor([value], dtype=torch.int64, device=device)
    return [int(each) for each in group.all_gather(own, [1] * group.size).tolist()]


def connect(place: Place) -> Mesh:
    """Make the groups of a rank. All ranks call this, and it returns when all have."""
    rank, tp, size = place.rank, place.parallel.tensor_parallel_size, place.parallel.num_ranks
    store = _store(place)

    def group(name: str, members: Sequence[int]) -> PeerGroup:
        if len(members) == 1:
            return SingleRank()
        own = c10d.PrefixStore(name, store)
        return GlooGroup(_gloo(place, own, rank=members.index(rank), size=len(members)))

    def connect_gpus(device: torch.device) -> GpuGroups:
        return _connect_gpus(place, store, sharing=sharing, device=device)

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


def _connect_gpus(
    place: Place, store: c10d.Store, sharing: Group, device: torch.device
) -> GpuGroups:
    """Connect the ranks of tp and pp by NCCL. `sharing`: the ranks of tp, through host memory."""
    from windlass.parallel.nccl import NcclGroup, share_memory, why_unreachable

    tp, pp = place.parallel.tensor_parallel_size, place.parallel.pipeline_parallel_size
    stage, column = divmod(place.rank, tp)
    stages: NcclGroup | None = None
    ranks: NcclGroup | None = None
    if pp > 1:
        stages = NcclGroup(c10d.PrefixStore(f"nccl-pp-{column}", store), stage, pp)
    if tp > 1:
        ranks = NcclGroup(c10d.PrefixStore(f"nccl-{stage}", store), column, size=tp, device=device)
    why_not = None
    if place.parallel.distributed_backend == "nccl":
        why_not = "--distributed-backend nccl"
    elif place.exchange is None:
        why_not = "the ranks are on several machines"
    else:
        first = device.index - column
        why_not = why_unreachable(device, range(first, first + tp))
        if not least(sharing, why_not is None):  # all ranks must choose alike
            why_not = why_not or "a GPU cannot read the memory of another"
    name = f"symmetric-{stage}-{place.store.name}"  # a process may have several engines

    def share(num_bytes: int) -> SymmetricMemory:
        return share_memory(
            c10d.PrefixStore(name, store),
            column,
            tp,
            device=device,
            num_bytes=num_bytes,
            name=name,
        )

    return GpuGroups(
        tp=ranks or SingleRank(),
        pp=stages or SingleRank(),
        interrupts=tuple(group.abort for group in (ranks, stages) if group is not None),
        share_memory=share if why_not is None else None,
        why_not_shared=why_not or "",
    )


def _store(place: Place) -> c10d.Store:
    store, num_ranks = place.store, place.parallel.num_ranks
    if isinstance(store, StoreFile):
        return c10d.FileStore(store.path, num_ranks)
    return c10d.TCPStore(
        store.address,
        store.port,
        num_ranks,
        is_master=store.listener is not None,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=store.listener,
    )


def _gloo(place: Place, store: c10d.Store, rank: int, size: int) -> c10d.ProcessGroupGloo:
    gloo: Any = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = _TIMEOUT
    options._threads = _GLOO_THREADS
    # Not the host's name: other machines may not reach its address, or, with one machine, should not.
    own = _LOOPBACK if isinstance(place.store, StoreFile) else place.store.own_address
    options._devices = [gloo.create_device(hostname=own)]
    return c10d.ProcessGroupGloo(store, rank, size, options)
