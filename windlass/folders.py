"""The cache folder of a user: downloaded models, compiled kernels, measured costs.

Later starts run compiled code from it, so folders and files that another user could have written
are refused. Each subfolder belongs to the module that writes it.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from windlass.errors import ConfigError

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOT_USER = 0
_VARIABLE = "WINDLASS_CACHE"


def cache_dir() -> Path:
    """`$WINDLASS_CACHE`, else `$XDG_CACHE_HOME/windlass`, else `~/.cache/windlass`. Does not create it."""
    own = os.environ.get("WINDLASS_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    base = Path(shared).expanduser() if shared else _home() / ".cache"
    return base / "windlass"


def triton_cache_dir() -> Path:
    """The folder of kernels that Triton compiled, as Triton finds it."""
    own = os.environ.get("TRITON_CACHE_DIR")
    home = Path(os.environ.get("TRITON_HOME") or _home())
    return Path(own) if own else home / ".triton" / "cache"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:
        raise ConfigError(
            "this user has no home folder for the cache: set HOME, or WINDLASS_CACHE, "
            "TRITON_CACHE_DIR and HF_HOME, to folders that you can write"
        ) from error


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


def make_private(folder: Path, variable: str = _VARIABLE) -> None:
    """Create a subfolder of the cache, and the cache itself, with mode 0700, and check both."""
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, exist_ok=True)
    check_private(folder.parent, folder, variable=variable)


def check_private(*paths: Path, variable: str = _VARIABLE, use: str = "runs compiled code") -> None:
    """Raise ConfigError if another user owns or can change one of `paths`, or replace it; follows links.

    A path that does not exist passes. Files that root owns are trusted. `variable`: names the folder;
    `use`: of the files in it.
    """
    for path in paths:
        found = find_weakness(path)
        if found is not None:
            each, problem = found
            raise ConfigError(
                f"{each} {problem}. Windlass {use} from {path}, and uses "
                f"no file there that another user could have written. Set {variable} to a "
                "folder of your own (a new one is created with mode 0700), or, if this one is "
                f"yours and unchanged, run `chmod {'-R ' if each == path else ''}go-w {each}`."
            )


def package_weakness(path: Path) -> str | None:
    """How another user could change or replace an installed file; None if no user could.

    Installers give files the modes of the umask, so a group without other members may write.
    """
    found = find_weakness(path, own_group_writes=True)
    return None if found is None else " ".join(map(str, found))


def find_weakness(path: Path, own_group_writes: bool = False) -> tuple[Path, str] | None:
    """Where and how another user could change or replace a file; None if no user could.

    Windows is not checked: its access control lists are no modes.
    """
    if not hasattr(os, "geteuid"):
        return None
    try:
        status = path.stat()
        problem = writable_by_others(status)
        if problem is not None and own_group_writes and _is_own_group(status.st_gid):
            mode = stat.S_IMODE(status.st_mode)
            problem = _describe(mode & ~stat.S_IWGRP, mode, status.st_uid)
    except OSError:  # missing or unreadable, so nothing can be loaded from it
        return None
    if problem is not None:
        return path, problem
    absolute = Path(os.path.abspath(path))
    for link in (absolute, *absolute.parents):
        owner = link.lstat().st_uid
        if link.is_symlink() and owner not in (os.geteuid(), _ROOT_USER):
            return link, f"is a link of user {owner}, who can change it"
    # A user who can rename a folder above can put another one in its place.
    for above in (*absolute.parents, *path.resolve().parents):
        problem = _replaceable(above)
        if problem is not None:
            return above, problem
    return None


def _replaceable(folder: Path) -> str | None:
    """How another user could replace what is in a folder; None if no user could."""
    status = folder.stat()
    mode = stat.S_IMODE(status.st_mode)
    if mode & stat.S_ISVTX:  # only the owners of its files can rename them
        mode &= ~_OTHERS_WRITE
    if mode & stat.S_IWGRP and _is_own_group(status.st_gid):
        mode &= ~stat.S_IWGRP
    return _describe(mode, stat.S_IMODE(status.st_mode), status.st_uid)


def _is_own_group(group: int) -> bool:
    """Whether a group has no other member than this user: the group that many systems make for each."""
    import grp
    import pwd

    try:
        found, name = grp.getgrgid(group), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return found.gr_name == name and set(found.gr_mem) <= {name}


def writable_by_others(status: os.stat_result) -> str | None:
    """How another user could have changed a file; None if no user could."""
    mode = stat.S_IMODE(status.st_mode)
    return _describe(mode, mode, status.st_uid)


def _describe(writable: int, mode: int, owner: int) -> str | None:
    user = os.geteuid()
    if owner not in (user, _ROOT_USER):
        return f"belongs to user {owner}, and this process runs as user {user}"
    if writable & _OTHERS_WRITE:
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
