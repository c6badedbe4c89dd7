"""Opens files that must lie inside of given folders, links resolved.

A path that was checked may lead elsewhere when it is opened: a user who can write into a folder can replace
a part of the path by a link in between. So each folder on the way is opened relative to the one above it,
and none of them may be a link.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from windlass.machine.posix import need_posix

# As `opener` of `open`: a path and flags to a descriptor.
Opener = Callable[[str, int], int]


def open_below(roots: tuple[str, ...]) -> Opener:
    """An opener of files and folders inside of `roots`. Links are followed as long as they stay inside."""
    need_posix("--lora-root", "os.O_NOFOLLOW", "os.O_DIRECTORY", "os.O_NONBLOCK")
    tops = [Path(root).resolve() for root in roots]

    def opened(path: str, flags: int) -> int:
        real = Path(path).resolve()
        for top in tops:
            if real.is_relative_to(top):
                return _open_without_links(top, real.relative_to(top).parts, flags)
        raise PermissionError(
            errno.EACCES, f"it, or a link on its path, leads out of {', '.join(roots)}", path
        )

    return opened


def _open_without_links(top: Path, parts: tuple[str, ...], flags: int) -> int:
    """Open a file or folder; a part of its path below `top` that is a link raises OSError."""
    above = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            below = _open_part(part, os.O_RDONLY | os.O_DIRECTORY, above)
            os.close(above)
            above = below
        # A pipe in place of the file must not make the reader wait for a writer.
        found = _open_part(parts[-1] if parts else ".", flags | os.O_NONBLOCK, above)
    finally:
        os.close(above)
    mode = os.fstat(found).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        os.close(found)
        raise OSError(errno.EINVAL, "it is neither a file nor a folder", parts[-1])
    return found


def _open_part(name: str, flags: int, above: int) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    except OSError as error:
        if stat.S_ISLNK(os.lstat(name, dir_fd=above).st_mode):
            raise OSError(errno.ELOOP, "a link has replaced it meanwhile", name) from error
        raise
