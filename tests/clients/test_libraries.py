"""Libraries on top of the SDKs, each in a program of its own with its own packages.

They need other versions of packages than this project, so `make test-clients` installs them into an
environment of their own.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.serve.conftest import Server

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parent.parent.parent
PYTHON = Path(os.environ.get("WINDLASS_CLIENTS_PYTHON", ROOT / ".venv-clients/bin/python"))


@pytest.mark.skipif(not PYTHON.exists(), reason="make test-clients installs the libraries")
@pytest.mark.parametrize("program", sorted(PROGRAMS.glob("use_*.py")), ids=lambda path: path.stem)
def test_a_library(tiny: Server, says: Server, program: Path) -> None:
    result = subprocess.run(
        [PYTHON, program, tiny.url, says.url],
        cwd=PROGRAMS,
        env={**os.environ, "PYTHONPATH": "", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-5000:]
