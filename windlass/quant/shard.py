"""The features of a weight's axis that one rank holds.

Layers make shards from their process group, methods state the units in which their stored tensors can be
cut, and the loader reads only a shard's slice of each tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol

Region = tuple[slice, ...]  # a slice of each leading dimension of a tensor; (): all of it

_MAX_RANKS = 64


class Ranks(Protocol):
    """The ranks that share a weight; a process group is one."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Shard:
    """Features [start, stop) of an axis of `whole` features, of which units are never cut.

    even: all ranks hold the same number of units.
    replicated: as even, but if there are fewer units than ranks, neighbouring ranks hold the same unit.
    uneven: the ranks' numbers of units differ by at most one, and the last unit may be partial.
    """

    whole: int
    rank: int = 0
    size: int = 1  # number of ranks
    unit: int = 1  # features that stay together: those of a head
    rule: Literal["even", "replicated", "uneven"] = "even"

    @classmethod
    def even(cls, whole: int, ranks: Ranks, unit: int = 1) -> Shard:
        return cls(whole, ranks.rank, ranks.size, unit=unit)

    @classmethod
    def replicated(cls, whole: int, ranks: Ranks, unit: int) -> Shard:
        return cls(whole, ranks.rank, ranks.size, unit=unit, rule="replicated")

    @classmethod
    def uneven(cls, whole: int, ranks: Ranks, unit: int) -> Shard:
        return cls(whole, ranks.rank, ranks.size, unit=unit, rule="uneven")

    @property
    def start(self) -> int:
        return self._border(self._index)

    @property
    def stop(self) -> int:
        return self._border(self._index + 1)

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def counts(self) -> list[int]:
        """The number of features of each rank."""
        return [replace(self, rank=rank).count for rank in range(self.size)]

    @property
    def is_whole(self) -> bool:
        return self.count == self.whole

    def allows(self, size: int, unit: int) -> bool:
        """Whether `size` ranks can share the axis if a stored tensor is cut in units of `unit`."""
        num_shards, num_units = self._num_shards(size), self._num_units
        if num_shards == 1:
            return True
        if self.rule == "uneven":
            return num_units >= num_shards and self.unit % unit == 0
        equal = self.whole % (num_shards * math.lcm(self.unit, unit)) == 0
        return equal and size % num_shards == 0

    def allowed(self, unit: int) -> list[int]:
        """The numbers of ranks, up to 64, that can share the axis."""
        return [size for size in range(1, _MAX_RANKS + 1) if self.allows(size, unit)]

    @property
    def _num_units(self) -> int:
        return -(-self.whole // self.unit)

    def _num_shards(self, size: int) -> int:
        """The number of different shards."""
        return min(size, self._num_units) if self.rule == "replicated" else size

    @property
    def _index(self) -> int:
        return self.rank * self._num_shards(self.size) // self.size

    def _border(self, index: int) -> int:
        units = index * self._num_units // self._num_shards(self.size)
        return min(self.whole, units * self.unit)
