"""Starts the child processes of tests as copies of a process that has imported torch.

A process that `multiprocessing` spawns imports for seconds, and tests start hundreds of engines and
ranks. Here a nursery process has imported everything. It forks the child, hands it the descriptors,
environment and folder that a spawned process would have, and leaves it to this process, which is its
parent as if it had spawned it. A Python program that a test starts with `start` is forked
too, with a nursery of its own for its children. Programs of `subprocess`, and their children, start
without a nursery.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import util
from types import ModuleType
from typing import Any, NoReturn
from unittest import mock

_PR_SET_CHILD_SUBREAPER = 36
_LENGTH = struct.Struct("<I")
_MAX_FDS = 64
_PRELOAD = (
    *("windlass.serve.loop", "windlass.serve.http.worker", "windlass.text.template_worker"),
    *("windlass.cli.main", "windlass.serve.launch"),
)
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")  # of subprocess
_is_warm = False  # in a process that has imported everything

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
    fds = {fd: fd for fd in (0, 1, 2, *passfds)}
    return _nursery(os.getpid()).fork(args[args.index("-c") + 1], fds)


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start a Python program as `subprocess.Popen` does, with a nursery where children have one."""
    kind = _Program if util.spawnv_passfds is _spawn else subprocess.Popen
    return kind(command, text=True, **options)


class _Program(subprocess.Popen[str]):
    """A program that is forked: `-m` and a module, `-c` and code, or a file, with arguments."""

    def _execute_child(self, *given: Any) -> None:
        call = inspect.signature(super()._execute_child).bind(*given).arguments
        pipes = [call[end] for end in ("p2cread", "c2pwrite", "errwrite")]
        fds = {target: target if fd == -1 else fd for target, fd in enumerate(pipes)}
        program, *words = map(str, call["args"])
        changes = ("preexec_fn", "pass_fds", "cwd", "start_new_session", "process_group")
        assert program == sys.executable
        assert not any(call[name] for name in changes if call[name] != -1)
        code = f"from tests.warm_start import run_program; run_program({words})"
        self.pid = _nursery(os.getpid()).fork(code, fds, call["env"])
        self._child_created = True
        self._close_pipe_fds(*(call[end] for end in _PIPES))


class Nursery:
    """Owns the process that forks. It ends when this process has ended or closed the socket."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, other = socket.socketpair()
        with other:
            self._wait = self._start(other)
        atexit.register(self.close)

    def _start(self, other: socket.socket) -> Callable[[], object]:
        if _is_warm:
            pid = os.fork()
            if pid == 0:
                self._socket.close()
                serve(other.fileno())
                os._exit(0)
            return functools.partial(os.waitpid, pid, 0)
        code = f"from tests.warm_start import preload, serve; preload(); serve({other.fileno()})"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[other.fileno()], env=environment
        ).wait

    def close(self) -> None:
        self._socket.close()
        self._wait()

    def fork(
        self, code: str, fds: Mapping[int, int], environment: Mapping[str, str] | None = None
    ) -> int:
        """Start a process that runs the code of a spawned one; returns its number.

        `fds`: the descriptors of this process, by their numbers in the child.
        """
        environment = os.environ if environment is None else environment
        request = {"code": code, "env": {**environment}, "cwd": os.getcwd(), "fds": [*fds]}
        message = json.dumps(request).encode()
        with self._lock:
            # The process that forks the child ends at once, and an orphan goes to its next ancestor
            # that asks for orphans. Only here: others' orphans would stay as zombies.
            _set_subreaper(True)
            try:
                socket.send_fds(self._socket, [_LENGTH.pack(len(message))], [*fds.values()])
                self._socket.sendall(message)
                return int(_LENGTH.unpack(_receive(self._socket, _LENGTH.size))[0])
            finally:
                _set_subreaper(False)


def preload() -> None:
    """Import what a server and its processes import."""
    global _is_warm
    from windlass.build import import_torch

    import_torch()
    for name in _PRELOAD:
        importlib.import_module(name)
    gc.freeze()  # a collection in a child would copy the pages of all objects
    _is_warm = True


def serve(number: int) -> None:
    """The nursery's main function: fork a child for each request."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
    code: object = 0
    try:
        exec(request["code"])
    except SystemExit as end:
        code = end.code
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code or 0)  # the interpreter would take its copies of all modules apart


def run_program(words: list[str]) -> None:
    """Run a program as `python` with these arguments does; its children start warm."""
    _nursery(os.getpid())  # now, since threads of the program would be lost in a fork
    enable()
    option, *sys.argv = words
    if option == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif option == "-c":
        code, sys.argv[0] = sys.argv[0], "-c"
        sys.modules["__main__"] = ModuleType("__main__")
        exec(code, vars(sys.modules["__main__"]))
    else:
        sys.argv = words
        runpy.run_path(option, run_name="__main__")


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
