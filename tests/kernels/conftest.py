"""Runs cases in Triton's interpreter, which is enabled for a whole process."""

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
    """Check that a file's cases passed in the interpreter.

    All collected files start at once, in two processes of one core each. A failure in one file fails
    every file of its process.
    """
    items = request.session.items
    files = sorted({item.path for item in items if "interpreted" in item.fixturenames})
    with ThreadPoolExecutor(2) as pool:
        running = {}
        for half in (files[::2], files[1::2]):
            running |= dict.fromkeys(half, pool.submit(_run, half)) if half else {}

        def check(file: str) -> None:
            done = running[Path(file)].result()
            assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]

        yield check
