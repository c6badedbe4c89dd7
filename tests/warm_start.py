"""Starts the child processes of tests as copies of a process that has imported torch.

A process that `multiprocessing` spawns imports for seconds, and tests start hundreds of engines and
ranks. Here a nursery process has imported everything. It forks the child, hands it the descriptors,
environment and folder that a spawned process would have, and leaves it to this process, which is its
parent as if it had spawned it. Commands that tests run start their own children without a nursery.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import util
from typing import Any, NoReturn
from unittest import mock

_PR_SET_CHILD_SUBREAPER = 36
_LENGTH = struct.Struct("<I")
_MAX_FDS = 64
_PRELOAD = ("windlass.serve.loop", "windlass.serve.http.worker", "windlass.text.template_worker")


_spawn_cold = util.spawnv_passfds


def enable() -> None:
    """Start the processes that this process spawns from now on with a nursery."""
    util.spawnv_passfds = _spawn


@contextmanager
def cold() -> Iterator[None]:
    """Inside, processes are spawned as without a nursery."""
    with mock.patch.object(util, "spawnv_passfds", _spawn_cold):
        yield


@functools.cache
def _nursery(_pid: int) -> Nursery:
    return Nursery()


def _spawn(path: bytes, args: Sequence[str], passfds: Sequence[int]) -> int:
    if "--multiprocessing-fork" not in args:  # a process of multiprocessing itself
        return _spawn_cold(path, args, passfds)
    return _nursery(os.getpid()).fork(args[args.index("-c") + 1], passfds)


class Nursery:
    """Owns the process that forks. It ends when this process has ended or closed the socket."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, other = socket.socketpair()
        code = f"from tests.warm_start import serve; serve({other.fileno()})"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=[other.fileno()], env=environment
            )
        atexit.register(self.close)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def fork(self, code: str, passfds: Sequence[int]) -> int:
        """Start a process that runs the code of a spawned one; returns its number."""
        numbers = [0, 1, 2, *passfds]
        request = {"code": code, "env": dict(os.environ), "cwd": os.getcwd(), "fds": numbers}
        message = json.dumps(request).encode()
        with self._lock:
            # The process that forks the child ends at once, and an orphan goes to its next ancestor
            # that asks for orphans. Only here: others' orphans would stay as zombies.
            _set_subreaper(True)
            try:
                socket.send_fds(self._socket, [_LENGTH.pack(len(message))], numbers)
                self._socket.sendall(message)
                return int(_LENGTH.unpack(_receive(self._socket, _LENGTH.size))[0])
            finally:
                _set_subreaper(False)


def serve(number: int) -> None:
    """The nursery's main function: fork a child for each request."""
    from windlass.build import import_torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import_torch()
    for name in _PRELOAD:
        importlib.import_module(name)
    gc.freeze()  # a collection in a child would copy the pages of all objects
    requests = socket.socket(fileno=number)
    while True:
        header, fds, _, _ = socket.recv_fds(requests, _LENGTH.size, _MAX_FDS)
        if not header:
            return
        request = json.loads(_receive(requests, _LENGTH.unpack(header)[0]))
        reader, writer = os.pipe()
        if (between := os.fork()) == 0:
            child = os.fork()
            if child == 0:
                requests.close()
                break
            os.write(writer, _LENGTH.pack(child))
            os._exit(0)
        os.waitpid(between, 0)
        requests.sendall(os.read(reader, _LENGTH.size))
        for fd in (reader, writer, *fds):
            os.close(fd)
    _become(request, [reader, writer], fds)


def _become(request: dict[str, Any], own: Sequence[int], fds: Sequence[int]) -> NoReturn:
    """Be the process that was asked for."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for fd in own:
        os.close(fd)
    above = max(*request["fds"], *fds) + 1
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in fds]
    for fd in fds:
        os.close(fd)
    for copy, target in zip(copies, request["fds"], strict=True):
        os.dup2(copy, target)
        os.close(copy)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv[1:] = ["--multiprocessing-fork"]
    code = 0
    try:
        exec(request["code"])
    except SystemExit as end:
        code = end.code
    atexit._run_exitfuncs()
    os._exit(code)  # the interpreter would take its copies of all modules apart


def _receive(link: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = link.recv(count - len(found))
        if not more:
            raise EOFError("the other end of the nursery's socket is closed")
        found += more
    return found


def _set_subreaper(on: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)
