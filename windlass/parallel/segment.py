"""Memory that the ranks of one machine share. It has no name, so a killed process leaves nothing behind."""

from __future__ import annotations

import mmap
import os
import tempfile
from multiprocessing import reduction
from typing import Any


class Segment:
    """Owns a mapping of anonymous shared memory; arguments of a spawned process may contain it."""

    def __init__(self, num_bytes: int, descriptor: int | None = None) -> None:
        """`descriptor`: of a segment that another process made."""
        if descriptor is None:
            descriptor = _anonymous_file()
            os.ftruncate(descriptor, num_bytes)
        self.num_bytes = num_bytes
        self._descriptor = descriptor
        self.map = mmap.mmap(descriptor, num_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (type(self), self.num_bytes, reduction.DupFd(self._descriptor))

    def close(self) -> None:
        os.close(self._descriptor)


_LINE = 64  # bytes
_CHUNK_FLOATS = 2**19


class Exchange(Segment):
    """Where the ranks of a tensor-parallel group exchange tensors; collectives.cpp has its layout."""

    num_floats = _CHUNK_FLOATS

    @classmethod
    def of(cls, num_ranks: int) -> Exchange:
        """Memory for so many ranks."""
        return cls(_LINE * (1 + num_ranks) + 2 * num_ranks * 4 * _CHUNK_FLOATS)

    def set_lost(self) -> None:
        """Make all ranks that wait for each other raise."""
        self.map[0] = 1


def _opened(kind: type[Segment], num_bytes: int, duplicate: Any) -> Segment:
    return kind(num_bytes, duplicate.detach())


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("windlass")
    with tempfile.TemporaryFile() as file:  # has no name, or loses it at once
        return os.dup(file.fileno())
