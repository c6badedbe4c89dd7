"""Where a rank is among the ranks of its replica."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.config import ParallelConfig
from windlass.parallel.segment import Exchange


@dataclass(frozen=True, slots=True)
class StoreFile:
    """A file, for ranks on one machine."""

    path: str

    @property
    def name(self) -> str:
        """The same on all ranks, and another for each engine."""
        return self.path


@dataclass(frozen=True, slots=True)
class StoreServer:
    """A server in rank 0's process, for ranks on several machines."""

    address: str
    port: int
    own_address: str  # at which the ranks of other machines reach those of this one
    listener: int | None = None  # rank 0: the descriptor of the socket to serve

    @property
    def name(self) -> str:
        """The same on all ranks, and another for each engine."""
        return f"{self.address}:{self.port}"


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank a process is, and where the ranks find each other."""

    rank: int
    parallel: ParallelConfig
    store: StoreFile | StoreServer  # where the ranks find each other
    exchange: Exchange | None = (
        None  # of this rank's tensor-parallel group, if it is on one machine
    )

    @property
    def local_rank(self) -> int:
        """Its number on its machine: the index of its device."""
        return self.rank % self.parallel.ranks_per_node
