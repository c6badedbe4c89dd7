"""Where Windlass keeps what it made or fetched: one folder per user.

It holds compiled code that later starts run, so a folder or file that another user could have
written is refused. What lies in each subfolder belongs to the module that puts it there.
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
    """`$WINDLASS_CACHE`, else `$XDG_CACHE_HOME/windlass`, else `~/.cache/windlass`; not created."""
    own = os.environ.get("WINDLASS_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    base = Path(shared).expanduser() if shared else Path.home() / ".cache"
    return base / "windlass"


def cache_folder(name: str) -> Path:
    """A subfolder of the cache, created if it is missing, that no other user can change."""
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
    """Create a folder of the cache, and the cache itself, with mode 0700; check both."""
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, exist_ok=True)
    check_private(folder.parent, folder)


def check_private(*paths: Path) -> None:
    """Raise ConfigError if another user owns one of them or can write it; links are followed.

    A path that does not exist is fine. Files of root's are trusted, as all programs are.
    """
    if sys.platform == "win32":
        return
    for path in paths:
        try:
            status = path.stat()
        except OSError:  # not there, or not to be read: then nothing is loaded from it
            continue
        if (problem := _problem(status)) is not None:
            raise ConfigError(
                f"{path} {problem}. Windlass runs compiled code from its cache folder, and uses "
                "nothing there that another user could have written. Set WINDLASS_CACHE to a "
                "folder of your own (a new one is created with mode 0700), or, if this one is "
                f"yours and nobody has changed it, run `chmod -R go-w {path}`."
            )


def _problem(status: os.stat_result) -> str | None:
    """How another user could have changed a file; None: in no way."""
    mode, user = stat.S_IMODE(status.st_mode), os.geteuid()
    if status.st_uid not in (user, _ROOT_USER):
        return f"belongs to user {status.st_uid}, and this process runs as user {user}"
    if mode & _OTHERS_WRITE:
        return f"has mode {mode:04o}, so that other users can change it"
    return None


def write_atomically(path: Path, text: str) -> None:
    """Write a file with mode 0600 so that readers see all of it or what was there before."""
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
