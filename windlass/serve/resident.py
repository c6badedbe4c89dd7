"""Lets go of the pages of program code that only the start needed: two thirds of torch's libraries.

The system has them in its file cache, and maps those that are used again when they are.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

_MAPS = Path("/proc/self/maps")


def release_code() -> None:
    """Unmap the pages of all mapped code. Where the system tells no mappings, nothing happens."""
    if not _MAPS.exists():
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in _MAPS.read_text(encoding="utf-8").splitlines():
        addresses, rights, *_, name = line.split(maxsplit=5)
        # Code alone: it was never written to, as parts of a library that only read may have been.
        if rights == "r-xp" and name.startswith("/"):
            start, end = (int(address, 16) for address in addresses.split("-"))
            advise(start, end - start, mmap.MADV_DONTNEED)
