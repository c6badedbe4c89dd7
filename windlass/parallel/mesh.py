"""Process groups for communication between ranks.

A group of one rank has no overhead, so layers need no special case for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


class Group(Protocol):
    """A process group: ranks that share one tensor."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' tensors."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' tensors, concatenated along the last dimension, whose sizes may differ."""
        ...


@dataclass(frozen=True, slots=True)
class SingleRank:
    """A group of one rank."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True, slots=True)
class Mesh:
    """The process groups of this process."""

    tp: Group = field(default_factory=SingleRank)
    ep: Group = field(default_factory=SingleRank)

    @property
    def expert_tp(self) -> Group:
        """The ranks that share each expert: those of tp, unless ep divides the experts among them."""
        return self.tp if self.ep.size == 1 else SingleRank()
