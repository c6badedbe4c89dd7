"""How ranks talk. A mesh of one process costs nothing, and layers never ask how many there are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


class Group(Protocol):
    """Ranks that share one tensor."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def all_gather(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Alone:
    """The group of one rank."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True, slots=True)
class Mesh:
    """The groups that this process belongs to."""

    tp: Group = field(default_factory=Alone)
