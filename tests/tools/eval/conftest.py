"""A tiny model with random weights and a chat template, and text files of all kinds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from tests.tools.conftest import CONFIG
from windlass.cli.main import app

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TEXT = "A windlass lifts heavy loads with a light lever. " * 12
LINES = [
    {"text": "The rope is wound around a drum.", "label": "prose"},
    {"text": "def wind(rope):\n    return rope[1:]\n", "label": "code"},
    {
        "messages": [
            {"role": "user", "content": "What is a winch?"},
            {"role": "assistant", "content": "A machine that pulls a rope."},
        ],
        "label": "chat",
    },
]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with byte tokens; for dummy weights."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": 0}))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    path = tmp_path / "labelled.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


@pytest.fixture
def evaluate(toy: Path) -> Run:
    """Run `windlass eval` on the tiny model; return exit code, stdout and stderr."""

    def run(*args: object) -> tuple[int, str, str]:
        fixed = ["eval", toy, "--load-format", "dummy", "--no-progress", "--num-threads", "1"]
        result = CliRunner().invoke(app, list(map(str, [*fixed, *args])))
        if result.exception and not isinstance(result.exception, (SystemExit, typer.Exit)):
            raise result.exception
        return result.exit_code, result.stdout, result.stderr

    return run
