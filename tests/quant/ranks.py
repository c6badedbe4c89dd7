"""Ranks without processes: groups, a checkpoint that records its reads, and joining of shards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from windlass.layers.linear import Linear
from windlass.models.checkpoint import Checkpoint, StoredTensor
from windlass.models.loader import load
from windlass.models.network import Weights
from windlass.parallel.mesh import Group, SingleRank
from windlass.quant.shard import Region

CPU = torch.device("cpu")
Make = Callable[[Group], Weights]


@dataclass(frozen=True)
class FakeGroup:
    """A rank whose partial results stay as they are: the test sums or concatenates them."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        return x.split(list(counts))[self.rank]

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        assert x.shape[-1] == widths[self.rank]
        return x

    def all_to_all(self, x: Tensor, *, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        raise AssertionError(f"a test cannot join {sent} and {received} rows of {x.shape}")


@dataclass
class ThreadGroup:
    """A rank that exchanges tensors with those in the other threads."""

    rank: int
    barrier: threading.Barrier
    slots: list[Any]

    @property
    def size(self) -> int:
        return len(self.slots)

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        return self.all_reduce(x).split(list(counts))[self.rank]

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        assert x.shape[-1] == widths[self.rank]
        return torch.cat(self._exchange(x), dim=-1)

    def all_to_all(self, x: Tensor, *, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        assert sum(sent) == len(x)
        parts = self._exchange(x.split(list(sent)))
        found = [part[self.rank] for part in parts]
        assert [len(rows) for rows in found] == list(received)
        return torch.cat(found)

    def _exchange(self, x: Any) -> list[Any]:
        self.slots[self.rank] = x
        self.barrier.wait(timeout=60)
        found = [slot for slot in self.slots if slot is not None]
        self.barrier.wait(timeout=60)
        return found


def thread_groups(size: int) -> list[ThreadGroup]:
    barrier, slots = threading.Barrier(size), [None] * size
    return [ThreadGroup(rank, barrier, slots) for rank in range(size)]


def in_threads(calls: list[Callable[[], Tensor]]) -> list[Tensor]:
    """Results of calls that wait for each other."""
    found: list[Tensor | None] = [None] * len(calls)

    def run(index: int) -> None:
        found[index] = calls[index]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    return [result for result in found if result is not None]


@dataclass
class Spy:
    """A checkpoint that records what is read: shape, region and values by tensor name."""

    checkpoint: Checkpoint
    reads: dict[str, tuple[tuple[int, ...], Region, Tensor]] = field(default_factory=dict)

    def names(self) -> Collection[str]:
        return self.checkpoint.names()

    def stored(self, name: str) -> StoredTensor:
        return self.checkpoint.stored(name)

    def read(
        self, name: str, shape: tuple[int, ...], region: Region = (), *, raw: bool = False
    ) -> Tensor:
        found = self.checkpoint.read(name, shape, region, raw=raw)
        self.reads[name] = (shape, region, found.clone())
        return found


@dataclass(frozen=True)
class Ranks:
    """A module loaded whole and in shards, with what each load read."""

    whole: Weights
    shards: list[Weights]
    whole_reads: Spy
    shard_reads: list[Spy]

    @classmethod
    def of(cls, make: Make, checkpoint: Checkpoint, size: int) -> Ranks:
        groups = [SingleRank(), *(FakeGroup(rank, size) for rank in range(size))]
        spies = [Spy(checkpoint) for _ in groups]
        made = [make(group) for group in groups]
        for module, spy in zip(made, spies, strict=True):
            load(module, spy, CPU)
        return cls(made[0], made[1:], spies[0], spies[1:])

    def assert_reads_join(self) -> None:
        """Every entry of every tensor is read, by the ranks together, and no rank reads more than its own."""
        for name, (shape, region, whole) in self.whole_reads.reads.items():
            assert region == ()
            joined, seen = torch.zeros_like(whole), torch.zeros(whole.shape, dtype=torch.bool)
            for spy in self.shard_reads:
                own_shape, own_region, found = spy.reads[name]
                assert own_shape == shape
                assert found.shape == joined[own_region].shape
                joined[own_region], seen[own_region] = found, True
            assert seen.all(), name
            assert torch.equal(_bits(joined), _bits(whole)), name

    def linears(self) -> Iterator[tuple[str, Linear, list[Linear]]]:
        for path, layer in self.whole.named_modules():
            if isinstance(layer, Linear):
                yield path, layer, [shard.get_submodule(path) for shard in self.shards]  # type: ignore[misc]


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8) if values.ndim else values


def joined_outputs(shards: list[Linear], x: Tensor) -> Tensor:
    """The outputs of a layer: row-parallel ranks are summed, column-parallel ones concatenated by part."""
    found = [shard(x[:, shard.inputs.start : shard.inputs.stop]) for shard in shards]
    if not shards[0].inputs.is_whole:
        return torch.stack(found).sum(0)
    parts = [
        y.split(list(shard.parts.values()), -1) for y, shard in zip(found, shards, strict=True)
    ]
    columns = []
    for i, name in enumerate(shards[0].outputs):
        outputs = [shard.outputs[name] for shard in shards]
        y = torch.zeros(len(x), outputs[0].whole)
        for own, part in zip(outputs, parts, strict=True):
            y[:, own.start : own.stop] = part[i]
        columns.append(y)
    return torch.cat(columns, -1)
