"""A tiny model with a tokenizer, prompts for it, and the CLI in this process."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.tools.quantize.conftest import write_model
from windlass.cli.main import app
from windlass.tools import resumable

TrainDraft = Callable[..., str]

# One thread: on a busy machine several threads wait for each other.
ONE_CORE = ("--device", "cpu", "--num-threads", "1")
SMALL = ("--context", "48", "--max-tokens", "24", "--batch-tokens", "512", "--epochs", "8")
EAGLE = ("--kind", "eagle", "--unroll", "3", "--draft-vocab", "64", *SMALL)
MEDUSA = ("--kind", "medusa", "--heads", "2", "--lr", "0.02", *SMALL)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=4)


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty prompts, conversations and texts of random words."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    words = random.Random(0)
    lines: list[dict[str, object]] = []
    for number in range(30):
        text = " ".join(words.choice(["a", "rope", "lifts", "it"]) for _ in range(4))
        if number % 3 == 0:
            answer = {"role": "assistant", "content": "left out"}
            lines.append({"messages": [{"role": "user", "content": text}, answer]})
        else:
            lines.append({"prompt" if number % 3 == 1 else "text": f"{text} {number}"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def full_disk(
    writes: list[str], is_full: Callable[[list[str]], bool]
) -> Callable[[Path, bytes], None]:
    """A `write_durably` that records file names, and fails when `is_full` of these names."""
    real = resumable.write_durably

    def write(path: Path, data: bytes) -> None:
        writes.append(path.name)
        if is_full(writes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, data)

    return write


@pytest.fixture
def train_draft(model: Path, prompts: Path) -> TrainDraft:
    """Train into a folder and return the output; `code` is the expected exit code."""

    def invoke(
        out: Path,
        *options: object,
        code: int = 0,
        model: Path = model,
        data: Path | None = prompts,
    ) -> str:
        given = ("--data", data) if data is not None else ()
        words = ("train-draft", model, "-o", out, *given, *options, "--no-progress", *ONE_CORE)
        result = CliRunner().invoke(app, list(map(str, words)))
        unexpected = (SystemExit, KeyboardInterrupt)
        if result.exception is not None and not isinstance(result.exception, unexpected):
            raise result.exception
        assert result.exit_code == code, result.output
        return result.output

    return invoke
