"""This process's pages of memory, as Linux tells them: what is mapped where, and giving some back."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from windlass.errors import EngineError

_MAPS = Path("/proc/self/maps")
_DONTNEED = 4  # Linux's number: Python has none elsewhere
PAGE = mmap.PAGESIZE


class Mapping(NamedTuple):
    """Addresses from `first` to before `end`."""

    first: int
    end: int
    rights: str  # such as r-xp
    file: str  # "" where there is none


def mappings() -> Iterator[Mapping]:
    """All of them in order; none where the system does not tell."""
    lines = _MAPS.read_text(encoding="utf-8").splitlines() if _MAPS.exists() else []
    for line in lines:
        where, rights, *_, file = f"{line} ".split(" ", maxsplit=5)
        first, end = (int(part, 16) for part in where.split("-"))
        yield Mapping(first, end, rights, file.strip())


def give_back(first: int, length: int) -> None:
    """Let the system have whole pages; mapped files are read again when they are wanted."""
    at, count = ctypes.c_void_p(first), ctypes.c_size_t(length)
    if length and libc().madvise(at, count, _DONTNEED):
        number = ctypes.get_errno()
        raise EngineError(f"the system did not take {length} bytes back: error {number}.")


def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
