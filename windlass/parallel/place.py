"""Where a rank is among the ranks of its replica."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.config import ParallelConfig
from windlass.parallel.segment import Exchange


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank a process is, and where the ranks find each other."""

    rank: int
    parallel: ParallelConfig
    store_file: str | None  # None: the ranks are on several machines
    exchange: Exchange | None = None  # of this rank's tensor-parallel group

    @property
    def local_rank(self) -> int:
        """Its number on its machine: the index of its device."""
        return self.rank % self.parallel.ranks_per_node
