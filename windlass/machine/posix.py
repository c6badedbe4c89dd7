"""Systems without all of POSIX (Windows, macOS): a feature that needs more than they have is refused by name."""

from __future__ import annotations

import importlib
import mmap
import sys

from windlass.errors import UnsupportedError


def need_posix(feature: str, *names: str) -> None:
    """Raise UnsupportedError if this system lacks a module or function: need_posix("x", "fcntl", "os.fork")."""
    for name in names:
        module, _, attribute = name.partition(".")
        try:
            found = importlib.import_module(module)
        except ImportError:
            found = None
        if found is None or (attribute and not hasattr(found, attribute)):
            raise UnsupportedError(
                f"{feature} needs {name}, which this system ({sys.platform}) does not have. Use Linux, a "
                "container, or WSL 2 on Windows."
            )


def map_private(num_bytes: int) -> mmap.mmap:
    """Map memory of this process alone; the system provides its pages when they are first written."""
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, num_bytes)  # Windows: memory without a name is private
