"""Benchmarks import none of the server's dependencies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# Prelude of a program that must not import the server's dependencies.
WITHOUT_SERVER = """
import sys

REFUSED = {"pydantic", "pydantic_core", "fastapi", "starlette", "uvicorn", "zmq", "msgspec", "gguf",
           "httptools", "llguidance", "plotly", "optuna"}

def importer():
    frame = sys._getframe(2)
    while "importlib" in frame.f_globals.get("__name__", ""):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "").split(".")[0]

class Refuse:
    # Only imports by windlass: some versions of typer import pydantic themselves.
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in REFUSED and importer() == "windlass":
            raise ImportError(f"{name} is refused here")

sys.meta_path.insert(0, Refuse())
"""

_PROGRAM = (
    WITHOUT_SERVER
    + """
import windlass.build, windlass.llm
from windlass.cli.main import app

folder = sys.argv[1]
sizes = ["--input-len", "8", "--output-len", "3"]
for words in (
    ["bench", "throughput", folder, "--workload", "decode_b2", *sizes],
    ["bench", "latency", folder, "--batch", "1", *sizes],
    ["profile", folder, "--steps", "1"],
    ["bench", "levers", "scheduler", "-o", folder],
    ["ladder", folder, "--rungs", "continuous", "--loads", "low", "--low-requests", "1",
     "--no-progress", "-o", folder + "/ladder.json", "--prefix-len", "24", "--output-len", "3"],
):
    model = [] if "levers" in words else ["--load-format", "dummy"]
    app([*words, *model], standalone_mode=False)
"""
)


def test_bench_and_profile_run_without_the_servers_modules(tiny: Path) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(tiny)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "decode_b2" in result.stdout
    assert "decode: 1 tokens" in result.stdout
    assert "| continuous batching |" in result.stdout
    assert "no page with plots: a report needs the package plotly" in result.stderr
