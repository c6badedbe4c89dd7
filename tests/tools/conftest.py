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
    """Programs that build engines in turn have all garbage looked for after each, which takes
    longer than what they do here: dozens of collections over all that the tests imported.
    """
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only a config.json: dummy weights, bytes as tokens."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def windlass() -> Windlass:
    """Run a command and give what it printed; `code` is the exit code it must have."""

    def invoke(*args: object, code: int = 0) -> str:
        result = CliRunner().invoke(app, list(map(str, args)))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result.output

    return invoke
