"""Process groups for communication between ranks.

A group of one rank has no overhead, so layers need no special case for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from windlass.parallel.segment import Exchange


class Group(Protocol):
    """A process group: ranks that share one tensor."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' tensors, in the order of the ranks: the same bits on every rank."""
        ...

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """This rank's rows of the sum of all ranks' tensors, whose first rows are those of rank 0, ...

        `counts`: the rows of each rank, equal but for the last.
        """
        ...

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """All ranks' tensors, concatenated along the last dimension, of which each has its width."""
        ...

    def all_to_all(self, x: Tensor, *, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """The rows that all ranks send to this one, in the order of the ranks.

        x has the rows for rank 0, then those for rank 1, ...: `sent` for each; `received` from each.
        """
        ...


class Sending(Protocol):
    """A tensor on its way to another rank."""

    def wait(self) -> object:
        """Wait until it has left. Before that, the tensor must not change."""
        ...


class PeerGroup(Group, Protocol):
    """A group whose ranks also send tensors to one another."""

    def send(self, x: Tensor, to: int) -> Sending:
        """Send a tensor without waiting. A pair of ranks exchanges tensors in order."""
        ...

    def receive(self, into: Tensor, source: int) -> None:
        """Wait for the next tensor of a rank, which has the shape and type of `into`."""
        ...


class SymmetricMemory(Protocol):
    """A buffer of this rank that all GPUs of its group can read and write, and those of the others."""

    @property
    def buffer(self) -> Tensor: ...

    @property
    def addresses(self) -> Sequence[int]:
        """Of the buffers of all ranks, in this process."""
        ...


@dataclass(frozen=True, slots=True)
class GpuGroups:
    """Groups of ranks with a GPU each."""

    tp: Group
    pp: PeerGroup
    interrupts: tuple[Callable[[], None], ...]  # see Mesh
    # Makes symmetric memory of so many bytes for the ranks of tp. All of them call it.
    share_memory: Callable[[int], SymmetricMemory] | None = None
    why_not_shared: str = ""


@dataclass(frozen=True, slots=True)
class SingleRank:
    """A group of one rank."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        del counts
        return x

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        del widths
        return x

    def all_to_all(self, x: Tensor, *, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        del sent, received
        return x

    def send(self, x: Tensor, to: int) -> Sending:
        raise AssertionError(f"there is no rank {to} to send {x.shape} to")

    def receive(self, into: Tensor, source: int) -> None:
        raise AssertionError(f"there is no rank {source} to receive {into.shape} from")


@dataclass(frozen=True, slots=True)
class Mesh:
    """The process groups of this process.

    tp shares every layer, pp divides the layers into stages, ep divides experts over the ranks of tp;
    world has all ranks of the replica. Rank r of the world has the stage r // tp.size.
    """

    tp: Group = field(default_factory=SingleRank)
    pp: PeerGroup = field(default_factory=SingleRank)
    ep: Group = field(default_factory=SingleRank)
    world: Group = field(default_factory=SingleRank)
    # Connects the ranks of tp and pp by NCCL. All ranks call it with their GPU, which none shares.
    connect_gpus: Callable[[torch.device], GpuGroups] | None = None
    exchange: Exchange | None = None  # shared memory of the ranks of tp, if they are on one machine
    # End what waits on this rank's GPU for a rank that is lost; its results are not valid.
    interrupts: list[Callable[[], None]] = field(default_factory=list)

    @property
    def expert_tp(self) -> Group:
        """The ranks that share each expert: those of tp, unless ep divides the experts among them."""
        return self.tp if self.ep.size == 1 else SingleRank()
