"""File descriptors: the process's limit, and how many connections fit below it.

A server that lets clients take its last descriptor cannot start its engine again: the new process
needs pipes and sockets. So connections get what is left above a reserve.
"""

from __future__ import annotations

import contextlib
import resource

import psutil

from windlass.config import AUTO
from windlass.core.card import Choice
from windlass.errors import ConfigError

# An engine restart takes about 20; the rest is for adapters' files, logs and refused connections.
RESERVE = 64
_MOST = 8192  # more would only wait for the engine
_PLENTY = 2**16  # where the hard limit is unlimited


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard one; child processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _PLENTY if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # macOS reports an unlimited hard limit and refuses large values: the soft one stays, and
        # the connection cap is computed from it.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connection_cap(requested: int) -> Choice:
    """How many connections may be open at once, and why; the value is a whole number.

    Counts the descriptors in use now, so it is called when the server's own are open.
    """
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _PLENTY if soft == resource.RLIM_INFINITY else soft
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
    if room > _MOST:
        return Choice("connections", str(_MOST), f"the most by default; {reason}")
    return Choice("connections", str(room), reason)
