"""Runs cases that need Triton's interpreter, which a process has or has not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

Check = Callable[[str], None]


def _run(files: list[Path]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore::DeprecationWarning"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *map(str, files)], env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="session")
def interpreted(request: pytest.FixtureRequest) -> Iterator[Check]:
    """Checks the cases of a file, and of those that run with it: all files that will be asked for
    begin at once, in two processes, since each keeps one core busy.
    """
    items = request.session.items
    files = sorted({item.path for item in items if "interpreted" in item.fixturenames})
    with ThreadPoolExecutor(2) as pool:
        running = {}
        for some in (files[::2], files[1::2]):
            running |= dict.fromkeys(some, pool.submit(_run, some)) if some else {}

        def check(file: str) -> None:
            done = running[Path(file)].result()
            assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]

        yield check
