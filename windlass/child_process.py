"""Child processes: they end with their parent, and not by signals to its process group."""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.process import BaseProcess
from pathlib import Path

_PR_SET_PDEATHSIG = 1
# Logs the stacks of all threads, even if one never returns to Python. None: Windows has no such signal.
DUMP_SIGNAL: int | None = getattr(signal, "SIGUSR1", None)


def start_child(process: BaseProcess) -> None:
    """Start a process that calls `die_with_parent`, in a thread that lives as long as this process.

    The kernel would kill the child when the thread that started it ends.
    """
    if threading.current_thread() is threading.main_thread():
        process.start()
    else:
        _Starter.of_process(os.getpid()).call(process.start)


class _Starter:
    """Owns a thread that never ends. One per process: a fork copies no threads."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, name="windlass-starter", daemon=True).start()

    @staticmethod
    @functools.cache
    def of_process(_pid: int) -> _Starter:
        return _Starter()

    def call(self, start: Callable[[], None]) -> None:
        done: Future[None] = Future()
        self._calls.put((start, done))
        done.result()

    def _run(self) -> None:
        while True:
            start, done = self._calls.get()
            try:
                start()
            except BaseException as error:  # raised in the thread that called
                done.set_exception(error)
            else:
                done.set_result(None)


def die_with_parent() -> None:
    """End this process when its parent ends; `start_child` must have started it.

    On Linux the kernel kills it, even while it is stopped. On other systems, and if the parent
    ended before this call, a thread does it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def dump_stacks_on_signal() -> None:
    """Log the stacks of all threads on DUMP_SIGNAL, and after a fatal signal."""
    faulthandler.enable()
    if DUMP_SIGNAL is not None:
        faulthandler.register(DUMP_SIGNAL, chain=False)


def children_that_dump(parent: int) -> list[int]:
    """The child processes of `parent` that log their stacks on DUMP_SIGNAL, which would end others.

    Linux tells which signals a process handles; elsewhere none are found.
    """
    found: list[int] = []
    if DUMP_SIGNAL is None:
        return found
    for file in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in file.read_text().splitlines())
        except (OSError, ValueError):  # it has just ended
            continue
        is_handled = int(fields.get("SigCgt", "0"), 16) >> (DUMP_SIGNAL - 1) & 1
        if int(fields.get("PPid", "0")) == parent and is_handled:
            found.append(int(file.parent.name))
    return sorted(found)


def ignore_signals() -> None:
    """Ignore the signals that end or reload a server.

    A terminal and a service manager signal the whole process group; the parent handles them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
