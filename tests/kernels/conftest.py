"""Starts the programs that slow tests wait for, and checks those of Triton's interpreter.

The interpreter is enabled for a whole process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.kernels import interpreter
from tests.kernels.background import TIMEOUT_S, Background, Program, users
from tests.kernels.native.backends import PORTABLE, backend_folder, build

Check = Callable[[str], None]

_WAITING = {"interpreted", "run_selftest", "built_pool"}  # fixtures that wait for programs
_BACKGROUND = pytest.StashKey[Background]()

if os.environ.get("TRITON_INTERPRET") == "1":
    interpreter.speed_up()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the files with tests that wait for programs to the end."""
    waiting: set[Path] = set()
    for item in items:
        if isinstance(item, pytest.Function) and _WAITING & {*item.fixturenames}:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S), append=False)
            waiting.add(item.path)
    items.sort(key=lambda item: item.path in waiting)


def pytest_collection_finish(session: pytest.Session) -> None:
    config = session.config
    worker = getattr(config, "workerinput", {}).get("workerid", "")  # of pytest-xdist
    folder = config._tmp_path_factory.getbasetemp()
    config.stash[_BACKGROUND] = Background((folder.parent if worker else folder) / "programs")
    if worker in ("", "gw0") and not config.option.collectonly:  # others start what they need
        _start(session)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (background := session.config.stash.get(_BACKGROUND, None)) is not None:
        background.stop()


def _start(session: pytest.Session) -> Background:
    background, config = session.config.stash[_BACKGROUND], session.config
    for item in users(session, "built_pool"):
        backend = item.callspec.params.get("pool", PORTABLE) if _has_params(item) else PORTABLE
        background.start(backend, partial(build, backend, backend_folder(config), background.run))
    for item in users(session, "run_selftest"):
        selftest = item.callspec.params["selftest"]
        background.start(selftest, partial(selftest.run, config, background.run))
    # Last, since they take longest: the jobs of a second process wait for those of the first.
    files = sorted({item.path for item in users(session, "interpreted")})
    for half in (files[::2], files[1::2]):
        if half:
            background.start(tuple(half), partial(_interpret, background, half))
    return background


def _has_params(item: pytest.Function) -> bool:
    return hasattr(item, "callspec")


@pytest.fixture(scope="session")
def background(request: pytest.FixtureRequest) -> Background:
    """The programs of the tests of this session, which have started."""
    return _start(request.session)


def _interpret(background: Background, files: list[Path]) -> Program:
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore::DeprecationWarning"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return background.run([*command, *files], environment)


@pytest.fixture(scope="session")
def interpreted(request: pytest.FixtureRequest, background: Background) -> Check:
    """Check that a file's cases passed in the interpreter.

    All collected files run in two processes. A failure in one file fails every file of its process.
    """
    files = sorted({item.path for item in users(request.session, "interpreted")})

    def check(file: str) -> None:
        half = files[files.index(Path(file)) % 2 :: 2]
        done = background.result(tuple(half))
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]

    return check
