"""Shared by the tests of fleets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.serve.tiny_model import write_tiny_model


@pytest.fixture(scope="package")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a long context, whose streams last until a test ends them."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "max_position_embeddings": 32768}))
    return folder
