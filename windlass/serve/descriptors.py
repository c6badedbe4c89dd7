"""File descriptors: the limit of the process, and the connections that fit below it.

A server that gives its last descriptor to a client cannot restart its engine: the new process
needs pipes and sockets. Therefore a reserve is subtracted from the connection limit.
"""

from __future__ import annotations

import contextlib
from importlib.util import find_spec

import psutil

from windlass.config import AUTO
from windlass.core.card import Choice
from windlass.errors import ConfigError

# An engine restart needs about 20; the rest is for adapter files, logs and refused connections.
RESERVE = 64
_MAX_DEFAULT = 8192  # more connections would only wait for the engine
_IF_UNLIMITED = 2**16  # used where the limit is infinite


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard one; child processes inherit it."""
    if find_spec("resource") is None:  # Windows has no such limit
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _IF_UNLIMITED if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < target:
        # macOS reports an unlimited hard limit and refuses large values: the soft limit stays, and
        # the connection limit is computed from it.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def connection_cap(requested: int) -> Choice:
    """Choose the connection limit, and give the reason; the value is an integer as text.

    Counts the descriptors in use, so call it after the server has opened its own.
    """
    if find_spec("resource") is None:
        count = _MAX_DEFAULT if requested == AUTO else requested
        return Choice("connections", str(count), "this system does not limit open files")
    import resource

    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _IF_UNLIMITED if soft == resource.RLIM_INFINITY else soft
    num_used = psutil.Process().num_fds()
    room = limit - num_used - RESERVE
    reason = f"{limit:,} descriptors, {num_used} in use, {RESERVE} reserved for engine restarts"
    if room < 1 or requested > room:
        raise ConfigError(
            f"--max-connections {'' if requested == AUTO else requested} does not fit the limit of "
            f"open files: {reason}. Raise the limit (ulimit -n), or lower --max-connections."
        )
    if requested != AUTO:
        return Choice("connections", str(requested), f"as set; {reason}")
    if room > _MAX_DEFAULT:
        return Choice("connections", str(_MAX_DEFAULT), f"default maximum; {reason}")
    return Choice("connections", str(room), reason)
