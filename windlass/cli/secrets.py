"""Removes keys and tokens from the environment of a server and from the process list."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from windlass.config import check_key

_log = logging.getLogger("windlass.serve")

API_KEY_VARIABLE = "WINDLASS_API_KEY"
_VARIABLES = {"api_key": API_KEY_VARIABLE, "admin_key": "WINDLASS_ADMIN_KEY"}
_CLUSTER_SECRET = "WINDLASS_CLUSTER_SECRET"
_HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # as huggingface_hub reads them
_ARG_START, _ARG_END = 47, 48  # fields of /proc/self/stat, from 0


# Parameters with secrets, of all commands.
_SECRETS = ("api_key", "admin_key", "cluster_secret", "hf_token", "header")


def with_environment_keys(
    options: Mapping[str, Any], environment: MutableMapping[str, str]
) -> dict[str, Any]:
    """Add the keys of the environment to `options`, and remove them from the environment.

    Otherwise the engine process and the sandboxes would inherit them. A variable that is set but empty is an error:
    that is more often a mistake than a request to serve without a key.
    """
    values = dict(options)
    for name, variable in _VARIABLES.items():
        key = environment.get(variable)
        if key is not None:
            check_key(key, f"${variable}")
            values[name] = [*values.get(name, ()), key]
            del environment[variable]
    secret = environment.pop(_CLUSTER_SECRET, None)
    if secret is not None and values.get("nnodes", 1) > 1:
        values.setdefault("cluster_secret", secret)
    tokens = [environment.pop(name, None) for name in _HUB_TOKENS]
    if values.get("hf_token") is None and any(tokens):
        values["hf_token"] = next(token for token in tokens if token)
    return values


def hide_secrets(parameters: Mapping[str, Any]) -> None:
    """Overwrite the secrets among a command's parameters in the process list."""
    found = [parameters.get(name) or () for name in _SECRETS]
    hide_arguments([key for keys in found for key in ([keys] if isinstance(keys, str) else keys)])


def hide_arguments(secrets: Sequence[str]) -> None:
    """Overwrite `secrets` in the command line of this process, which `ps` shows to other users.

    The secrets are visible from the start of the process until this call.
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
    """Replace the secret in SECRET or --flag=SECRET by as many x."""
    for secret in map(os.fsencode, secrets):
        if argument == secret or argument.endswith(b"=" + secret):
            return argument.removesuffix(secret) + b"x" * len(secret)
    return argument


def _overwrite_command_line(secrets: Sequence[str]) -> None:
    """Write to the memory of the original arguments, which the kernel shows in /proc."""
    # The second field is the program name in brackets, which may contain spaces.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START - 2]), int(fields[_ARG_END - 2])
    arguments = ctypes.string_at(start, end - start).split(b"\0")
    line = b"\0".join(_masked(argument, secrets) for argument in arguments)
    ctypes.memmove(start, line, len(line))
