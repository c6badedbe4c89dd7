"""A tiny model of random weights, and the command line in this process."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from windlass.cli.main import app

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}

Windlass = Callable[..., str]


@pytest.fixture(autouse=True)
def _frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speed up collections: tools that build several engines collect garbage after each of them,
    which takes longer than their work here, over all modules that the tests imported.
    """
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with only a config.json: dummy weights, bytes as tokens."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def windlass() -> Windlass:
    """Run a command and return its output; `code` is the expected exit code."""

    def invoke(*args: object, code: int = 0) -> str:
        result = CliRunner().invoke(app, list(map(str, args)))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result.output

    return invoke
