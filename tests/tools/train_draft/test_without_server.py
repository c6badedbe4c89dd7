"""Training imports none of the server's dependencies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.test_without_server import WITHOUT_SERVER
from tests.tools.train_draft.conftest import MEDUSA, ONE_CORE

_PROGRAM = (
    WITHOUT_SERVER
    + """
from windlass.cli.main import app

app(sys.argv[1:], standalone_mode=False)
"""
)


@pytest.mark.slow
def test_train_draft_runs_without_the_servers_modules(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ["train-draft", str(model), "-o", str(out), "--data", str(prompts), *MEDUSA, *ONE_CORE]
    command = [sys.executable, "-c", _PROGRAM, *words, "--max-steps", "1"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (out / "model.safetensors").is_file()
