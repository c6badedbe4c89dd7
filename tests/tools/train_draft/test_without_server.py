"""Training needs torch and little else: none of the server's dependencies is imported for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.tools.train_draft.conftest import MEDUSA, ONE_CORE

_PROGRAM = """
import sys

REFUSED = {"pydantic", "pydantic_core", "fastapi", "starlette", "uvicorn", "zmq", "msgspec", "gguf",
           "httptools", "llguidance"}

def asker():
    frame = sys._getframe(2)
    while "importlib" in frame.f_globals.get("__name__", ""):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "").split(".")[0]

class Refuse:
    # Only what we ask for: some versions of typer bring pydantic for themselves.
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in REFUSED and asker() == "windlass":
            raise ImportError(f"{name} is refused here")

sys.meta_path.insert(0, Refuse())

from windlass.cli.main import app

app(sys.argv[1:], standalone_mode=False)
"""


def test_train_draft_runs_without_the_servers_modules(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ["train-draft", str(model), "-o", str(out), "--data", str(prompts), *MEDUSA, *ONE_CORE]
    command = [sys.executable, "-c", _PROGRAM, *words, "--max-steps", "1"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (out / "model.safetensors").is_file()
