"""Runs the programs of slow kernel tests beside all other tests.

Interpreted kernels, self-tests and builds of the SIMD backends take minutes, so their programs start
at low priority when the tests are collected, and the tests that wait for them come last. The
processes of pytest-xdist share the results through files.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import signal
import subprocess
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

Program = subprocess.CompletedProcess[str]
Run = Callable[[Sequence[str | Path]], Program]

TIMEOUT_S = 1800  # of a test that waits: on a busy machine, for the programs of all tests
_NICE = ["nice", "-n", "10"] if shutil.which("nice") else []


class Background:
    """Owns the jobs of a session, by key, and the programs that they run.

    `folder` has the results of finished jobs.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._jobs: dict[Hashable, Future[Any]] = {}
        self._running: set[subprocess.Popen[str]] = set()
        self._is_stopped = False

    def start(self, key: Hashable, job: Callable[[], Any]) -> None:
        """Start a job; a key that has one already keeps it."""
        if key not in self._jobs:
            self._jobs[key] = self._pool.submit(self._once, key, job)

    def _once(self, key: Hashable, job: Callable[[], Any]) -> Any:
        """Run a job unless another process has run it."""
        file = self._folder / hashlib.blake2b(repr(key).encode(), digest_size=8).hexdigest()
        with FileLock(file.with_suffix(".lock")):
            if file.exists():
                return pickle.loads(file.read_bytes())
            result = job()
            if not self._is_stopped:
                file.write_bytes(pickle.dumps(result))
            return result

    def result(self, key: Hashable) -> Any:
        return self._jobs[key].result()

    def run(
        self, command: Sequence[str | Path], environment: Mapping[str, str] | None = None
    ) -> Program:
        """Run a program at low priority."""
        words = [*_NICE, *map(str, command)]
        with subprocess.Popen(
            words,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            self._running.add(process)
            if self._is_stopped:
                _kill(process)
            output, errors = process.communicate()
            self._running.discard(process)
        return subprocess.CompletedProcess(words, process.returncode, output, errors)

    def stop(self) -> None:
        """End the programs that still run."""
        self._is_stopped = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in list(self._running):
            _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a program and its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def is_skipped(item: pytest.Item) -> bool:
    return any(mark.args[0] for mark in item.iter_markers("skipif"))


def users(session: pytest.Session, fixture: str) -> list[pytest.Function]:
    """The tests of a session that request a fixture and are not skipped."""
    items = [item for item in session.items if isinstance(item, pytest.Function)]
    return [item for item in items if fixture in item.fixturenames and not is_skipped(item)]
