"""Fixtures that several rooms share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from windlass.config import ModelConfig
from windlass.models.source import resolve

if TYPE_CHECKING:
    import torch


@pytest.fixture(scope="session")
def default_gguf() -> Path:
    """The default model's file, fetched into the user's cache when it is not there yet."""
    return resolve(ModelConfig()).path


@pytest.fixture(scope="session")
def default_reference(default_gguf: Path) -> torch.nn.Module:
    """The default model as transformers reads the same file, in float32; takes half a minute."""
    import torch
    import transformers

    with torch.inference_mode():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            default_gguf.parent, gguf_file=default_gguf.name, dtype=torch.float32
        )
    return model.eval()
