"""How child processes of a server end: with the server, and not by signals to its process group."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """End this process when its parent ends.

    On Linux the kernel kills it, even while it is stopped, when the parent thread ends. On other
    systems, and if the parent ended before this call, a thread does it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def ignore_signals() -> None:
    """Ignore the signals that end or reload a server.

    A terminal and a service manager signal the whole process group; the parent handles them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform != "win32":
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
