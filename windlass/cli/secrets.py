"""Keys of `windlass serve` that must not be seen: those of the environment, and those in flags."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from windlass.cli.command import Options
from windlass.config import check_key

_log = logging.getLogger("windlass.serve")

_VARIABLES = {"api_key": "WINDLASS_API_KEY", "admin_key": "WINDLASS_ADMIN_KEY"}
_ARG_START, _ARG_END = 47, 48  # fields of /proc/self/stat, from 0


def with_environment_keys(options: Options, environment: MutableMapping[str, str]) -> Options:
    """`options` with the keys of the environment, which are taken out of it.

    The engine's process would inherit them otherwise. A variable that is set but empty is an error:
    it is more often a mistake than the wish to serve without a key.
    """
    values = dict(options.values)
    for name, variable in _VARIABLES.items():
        key = environment.get(variable)
        if key is not None:
            check_key(key, f"${variable}")
            values[name] = [*values.get(name, ()), key]
            del environment[variable]
    return Options(values)


def hide_arguments(secrets: Sequence[str]) -> None:
    """Overwrite `secrets` in this process's command line, as other users' `ps` shows it.

    Python cannot do more: from the start of the program until here they were to be seen.
    """
    hidden = [os.fsdecode(_masked(os.fsencode(argument), secrets)) for argument in sys.argv]
    if hidden == sys.argv:
        return
    sys.argv = hidden
    if sys.platform == "linux":
        _overwrite_command_line(secrets)
    else:
        _log.warning(
            "keys given as flags show in the process list; use --api-key-file, --admin-key-file, "
            "$WINDLASS_API_KEY or $WINDLASS_ADMIN_KEY"
        )


def _masked(argument: bytes, secrets: Sequence[str]) -> bytes:
    """SECRET and --flag=SECRET without the secret, of the same length."""
    for secret in map(os.fsencode, secrets):
        if argument == secret or argument.endswith(b"=" + secret):
            return argument.removesuffix(secret) + b"x" * len(secret)
    return argument


def _overwrite_command_line(secrets: Sequence[str]) -> None:
    """The kernel shows the memory that the arguments were put into at the start: ours to write."""
    # The second field is the program's name in brackets, which may have spaces.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START - 2]), int(fields[_ARG_END - 2])
    arguments = ctypes.string_at(start, end - start).split(b"\0")
    line = b"\0".join(_masked(argument, secrets) for argument in arguments)
    ctypes.memmove(start, line, len(line))
