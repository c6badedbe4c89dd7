"""A tiny model with random weights, with or without a tokenizer and a chat template."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from windlass.cli.main import app

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"

Invoke = Callable[..., "Outcome"]


class Outcome:
    """The result of a command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err


@pytest.fixture
def windlass() -> Invoke:
    """Run a command in this process: windlass("serve", "--port", "1")."""

    def invoke(*args: str, stdin: str = "") -> Outcome:
        result = CliRunner().invoke(app, list(args), input=stdin)
        unexpected = result.exception
        if unexpected is not None and not isinstance(unexpected, (SystemExit, typer.Exit)):
            raise unexpected
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return invoke


@pytest.fixture(scope="session")
def bare_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only a config.json: dummy weights, bytes as tokens, no chat template."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder
