"""Records of KV blocks: the layout of a block's copy in host memory, and the interface of copies.

A record is the bytes of one block on this rank: its pages of all layers and, with codes, their scales;
then those of a drafter's own KV cache in the same block. All groups' blocks have the same bytes, so
every record has. A group with fewer layers leaves pages of its blocks unused; they are copied as well.

    record:  | pages: plane 0 | plane 1 | ... | scales: plane 0 | ... | the drafter's pages ... |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from windlass.core.types import BlockId
from windlass.errors import EngineError
from windlass.kernels.batch import KVCache
from windlass.kernels.storages import Held
from windlass.runner.host_rows import HostRows

# Pages are copied as words of the widest dtype that divides all sizes.
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class PendingCopy(Protocol):
    """A copy that was started."""

    def done(self) -> bool:
        """Whether the copy is complete; never blocks."""
        ...

    def wait(self) -> None:
        """Block until the copy is complete."""
        ...


class BlockCopies(Protocol):
    """Copies between blocks and rows of host memory. Called by the thread that submits steps.

    No block or row may be named twice in a copy. Until a copy is done, nothing else may use its
    rows, and no step may use the blocks of a `write`.
    """

    layout: RecordLayout
    record_bytes: int
    rows: HostRows

    def read(self, blocks: Sequence[BlockId], rows: Sequence[int]) -> PendingCopy:
        """Copy blocks into rows. The next step may overwrite the blocks at once."""
        ...

    def write(self, rows: Sequence[int], blocks: Sequence[BlockId]) -> PendingCopy:
        """Copy rows into blocks. Steps that were submitted before may still use the blocks."""
        ...

    def wait(self) -> None:
        """Block until all copies that were started are complete."""
        ...

    def storages(self) -> Iterator[Held]: ...

    def close(self) -> None:
        """Wait for all copies and free the rows. No other call may follow."""
        ...


@dataclass(frozen=True, slots=True)
class Section:
    """The part of every record that holds the pages of one tensor."""

    pages: Tensor  # [planes, blocks, words]
    first: int  # word in the record

    def of(self, records: Tensor) -> Tensor:
        """The section of records [..., words] as [..., planes, words]."""
        planes, _, words = self.pages.shape
        part = records[..., self.first : self.first + planes * words]
        return part.unflatten(-1, (planes, words))


class RecordLayout:
    """Where the pages of some KV caches, which use the same block ids, lie in a record."""

    def __init__(self, caches: Sequence[KVCache]) -> None:
        tensors = [pages for cache in caches for pages in cache.planes()]
        self.device = tensors[0].device
        self.word = next(
            word for word in _WORDS if all(each.shape[2] % word.itemsize == 0 for each in tensors)
        )
        self.num_blocks = min(each.shape[1] for each in tensors)
        self.sections: list[Section] = []
        first = 0
        for each in tensors:
            pages = each.view(self.word)
            self.sections.append(Section(pages, first))
            first += pages.shape[0] * pages.shape[2]
        self.record_bytes = first * self.word.itemsize

    def check(self, blocks: Sequence[BlockId], rows: Sequence[int], num_rows: int) -> None:
        """Refuse a copy that names a block or row twice, or one that does not exist."""
        for name, ids, count in (("blocks", blocks, self.num_blocks), ("rows", rows, num_rows)):
            if len(set(ids)) != len(ids):
                raise EngineError(f"a KV copy names {name} twice: {sorted(ids)}.")
            if ids and not 0 <= min(ids) <= max(ids) < count:
                raise EngineError(
                    f"a KV copy names {name} {sorted(ids)}, but there are only {count}."
                )
        if len(blocks) != len(rows):
            raise EngineError(f"a KV copy of {len(blocks)} blocks names {len(rows)} rows.")


class _Done:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


DONE: PendingCopy = _Done()
