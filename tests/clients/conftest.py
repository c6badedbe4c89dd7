"""Servers for client libraries: a tiny network that follows grammars, and a model that says what it is asked to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from tests.runner.test_deterministic import CONFIG
from tests.serve.conftest import Server, running
from tests.serve.fakes import CARD
from windlass.build import build_engine, open_model
from windlass.config import EngineConfig
from windlass.core.card import EngineReport
from windlass.engine import Engine

# Reasons and calls tools as Hermes does; the prompt opens the reasoning on demand.
TEMPLATE = """{%- for tool in tools %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}{{ '<' + message.role + '>' + message.content }}
{%- for call in message.tool_calls %}<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>{% endfor %}
{%- endfor %}<assistant>{{ '<think>' if enable_thinking }}"""


def _config(path: str) -> EngineConfig:
    return EngineConfig.of(model=path, load_format="dummy", device="cpu", num_blocks=1024)


def _build(path: str) -> tuple[Engine, EngineReport]:
    config = _config(path)
    built = build_engine(config, open_model(config).source)
    return built.engine, built.report


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real engine with random weights: only grammars give its output a form."""
    path = tmp_path_factory.mktemp("tiny")
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "intermediate_size": 128}
    sizes |= {"vocab_size": 280, "eos_token_id": 256, "max_position_embeddings": 8192}
    (path / "config.json").write_text(json.dumps(CONFIG | sizes))
    card = replace(open_model(_config(str(path))).card, name="tiny", chat_template=TEMPLATE)
    with running(partial(_build, str(path)), card=card) as server:
        yield server


@pytest.fixture(scope="package")
def says(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model that says the last text between SAY( and )YAS; with files and batches."""
    card = replace(CARD, chat_template=TEMPLATE, max_positions=8192)
    with running(card=card, data_dir=str(tmp_path_factory.mktemp("data"))) as server:
        yield server
