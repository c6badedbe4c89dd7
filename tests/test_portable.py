"""Every module imports on a system without POSIX: modules, functions and constants that Windows and macOS lack.

Features that need them are refused when they are used, with the reason.
"""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from typing import Any

import pytest

from windlass.errors import UnsupportedError
from windlass.machine.posix import map_private, need_posix

_PROGRAM = """
import importlib, json, mmap, os, pathlib, pkgutil, select, signal, socket, sys

ONLY_POSIX = ("fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty", "uvloop")
ATTRIBUTES = {
    os: ["fork", "forkpty", "geteuid", "getegid", "getuid", "getgid", "getloadavg", "getpgid", "killpg",
         "memfd_create", "mkfifo", "nice", "posix_fadvise", "posix_fallocate", "pread", "preadv", "pwrite",
         "pwritev", "register_at_fork", "sched_getaffinity", "sched_setaffinity", "setsid", "statvfs",
         "sysconf", "O_CLOEXEC", "O_DIRECT", "O_DIRECTORY", "O_NOCTTY", "O_NOFOLLOW"],
    signal: ["SIGALRM", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGPROF", "SIGSTOP", "SIGUSR1", "SIGUSR2",
             "SIGXCPU", "ITIMER_PROF", "ITIMER_REAL", "pthread_sigmask", "setitimer", "siginterrupt"],
    socket: ["AF_UNIX", "SOCK_SEQPACKET", "SO_REUSEPORT", "recv_fds", "send_fds", "socketpair"],
    select: ["poll", "epoll"],
    mmap: [name for name in dir(mmap) if name.startswith(("MADV_", "MAP_", "PROT_"))],
}


def names():
    import windlass

    yield "windlass"
    for module in pkgutil.walk_packages(windlass.__path__, "windlass."):
        if not module.name.endswith("__main__"):
            yield module.name


def import_all():
    failed = {}
    for name in list(names()):
        try:
            importlib.import_module(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    return failed


def message(call):
    try:
        return str(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# The first import loads the dependencies, which may use what is removed then.
unavailable = import_all()
for name in [name for name in sys.modules if name.split(".")[0] == "windlass"]:
    del sys.modules[name]
for name in ONLY_POSIX:
    sys.modules[name] = None
for module, removed in ATTRIBUTES.items():
    for name in removed:
        if hasattr(module, name):
            delattr(module, name)
failed = {name: error for name, error in import_all().items() if name not in unavailable}

from windlass.config import AUTO, GrammarConfig
from windlass.machine.topology import read_topology, share_cpus
from windlass.serve.descriptors import connection_cap, raise_descriptor_limit
from windlass.serve.listener import _bind_path
from windlass.text.grammar.sandbox import Sandbox
from windlass.tiers.disk_files import open_directory

raise_descriptor_limit()
used = {
    "sandbox": message(lambda: Sandbox(None, GrammarConfig()).start()),
    "disk": message(lambda: open_directory(pathlib.Path(sys.argv[1]) / "kv")),
    "uds": message(lambda: _bind_path(sys.argv[1] + "/socket", 0o600)),
    "connections": connection_cap(AUTO).reason,
    "threads": share_cpus(read_topology()).num_threads,
}
print(json.dumps({"unavailable": unavailable, "failed": failed, "used": used}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process without POSIX imported and refused."""
    folder = str(tmp_path_factory.mktemp("portable"))
    command = [sys.executable, "-c", _PROGRAM, folder]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_module_imports(found: dict[str, Any]) -> None:
    assert found["failed"] == {}


def test_only_modules_of_missing_extras_were_not_tried(found: dict[str, Any]) -> None:
    optional = ("windlass.cluster.", "windlass.tools.eval.lm_eval", "windlass.serve.otel")
    assert [name for name in found["unavailable"] if not name.startswith(optional)] == []


def test_features_are_refused_when_used(found: dict[str, Any]) -> None:
    used = found["used"]
    assert used["sandbox"].startswith(
        "UnsupportedError: Structured output (its sandbox) needs os.fork"
    )
    assert used["disk"].startswith("UnsupportedError: --prefix-cache-dir needs fcntl")
    assert used["uds"].startswith("UnsupportedError: --uds needs socket.AF_UNIX")
    assert used["connections"] == "this system does not limit open files"
    assert used["threads"] >= 1


def test_what_a_feature_needs() -> None:
    need_posix("a feature", "os", "os.getpid")
    with pytest.raises(UnsupportedError, match=r"a feature needs os\.teleport, which this system"):
        need_posix("a feature", "os.teleport")
    with pytest.raises(UnsupportedError, match="needs no_such_module"):
        need_posix("a feature", "no_such_module")


def test_private_memory_is_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        with map_private(8192) as memory:
            memory[8191] = 7
            assert memory[8190:] == b"\0\7"
        monkeypatch.delattr(mmap, "MAP_PRIVATE", raising=False)  # as on Windows
