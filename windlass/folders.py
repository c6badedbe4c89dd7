"""The cache folder of a user: downloaded models, compiled kernels, measured costs.

Later starts run compiled code from it, so folders and files that another user could have written
are refused. Each subfolder belongs to the module that writes it.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from pathlib import Path

from windlass.errors import ConfigError

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOT_USER = 0


def cache_dir() -> Path:
    """`$WINDLASS_CACHE`, else `$XDG_CACHE_HOME/windlass`, else `~/.cache/windlass`. Does not create it."""
    own = os.environ.get("WINDLASS_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    base = Path(shared).expanduser() if shared else Path.home() / ".cache"
    return base / "windlass"


def cache_folder(name: str) -> Path:
    """Return a subfolder of the cache that no other user can write; create it if missing."""
    folder = cache_dir() / name
    try:
        make_private(folder)
    except OSError as error:
        raise ConfigError(
            f"cannot create {folder}: {error.strerror or error}. Set WINDLASS_CACHE to a folder "
            "that you can write."
        ) from error
    return folder


def make_private(folder: Path) -> None:
    """Create a subfolder of the cache, and the cache itself, with mode 0700, and check both."""
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, exist_ok=True)
    check_private(folder.parent, folder)


def check_private(*paths: Path) -> None:
    """Raise ConfigError if another user owns or can write one of `paths`; follows links.

    A path that does not exist passes. Files that root owns are trusted.
    """
    if sys.platform == "win32":
        return
    for path in paths:
        try:
            status = path.stat()
        except OSError:  # missing or unreadable, so nothing can be loaded from it
            continue
        if (problem := _problem(status)) is not None:
            raise ConfigError(
                f"{path} {problem}. Windlass runs compiled code from its cache folder, and uses "
                "no file there that another user could have written. Set WINDLASS_CACHE to a "
                "folder of your own (a new one is created with mode 0700), or, if this one is "
                f"yours and unchanged, run `chmod -R go-w {path}`."
            )


def _problem(status: os.stat_result) -> str | None:
    """How another user could have changed a file; None if no user could."""
    mode, user = stat.S_IMODE(status.st_mode), os.geteuid()
    if status.st_uid not in (user, _ROOT_USER):
        return f"belongs to user {status.st_uid}, and this process runs as user {user}"
    if mode & _OTHERS_WRITE:
        return f"has mode {mode:04o}, so that other users can change it"
    return None


def write_atomically(path: Path, text: str) -> None:
    """Write a file with mode 0600. Readers see the old content or all of the new content."""
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
