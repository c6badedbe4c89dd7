"""Fixtures that several rooms share."""

from __future__ import annotations

from pathlib import Path

import pytest

from windlass.config import ModelConfig
from windlass.models.source import resolve


@pytest.fixture(scope="session")
def default_gguf() -> Path:
    """The default model's file, fetched into the user's cache when it is not there yet."""
    return resolve(ModelConfig()).path
