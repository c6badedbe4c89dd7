"""Memory mappings of this process (/proc/self/maps), and releasing their pages. Linux."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from windlass.errors import EngineError

_MAPS = Path("/proc/self/maps")
_DONTNEED = 4  # MADV_DONTNEED on Linux; mmap has no such constant on other systems
PAGE = mmap.PAGESIZE


class Mapping(NamedTuple):
    """The address range from `first` up to, not including, `end`."""

    first: int
    end: int
    rights: str  # for example r-xp
    file: str  # "" for an anonymous mapping


def mappings() -> Iterator[Mapping]:
    """Yield all mappings by address; none on systems without /proc."""
    lines = _MAPS.read_text(encoding="utf-8").splitlines() if _MAPS.exists() else []
    for line in lines:
        address_range, rights, *_, file = f"{line} ".split(" ", maxsplit=5)
        first, end = (int(part, 16) for part in address_range.split("-"))
        yield Mapping(first=first, end=end, rights=rights, file=file.strip())


def give_back(first: int, length: int) -> None:
    """Return whole pages to the system. A mapped file is read again on the next access."""
    address, size = ctypes.c_void_p(first), ctypes.c_size_t(length)
    if length and libc().madvise(address, size, _DONTNEED):
        number = ctypes.get_errno()
        raise EngineError(f"madvise failed for {length} bytes: error {number}.")


def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
