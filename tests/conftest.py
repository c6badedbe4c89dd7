"""Fixtures that several rooms share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from windlass.config import ModelConfig
from windlass.models.source import resolve

if TYPE_CHECKING:
    import torch


@pytest.fixture(scope="session")
def default_gguf() -> Path:
    """The default model's file, fetched into the user's cache when it is not there yet."""
    return resolve(ModelConfig()).path


@contextmanager
def faster_gguf() -> Iterator[None]:
    """While transformers reads a GGUF: it takes every entry of the vocabulary out of a memory map,
    which is slow where a plain view of it is not, and makes one table of names for each module.
    """
    import gguf
    import numpy

    memmap, table = numpy.memmap, cache(gguf.get_tensor_name_map)

    def viewed(*args: Any, **options: Any) -> numpy.ndarray:
        return memmap(*args, **options).view(numpy.ndarray)

    with mock.patch("numpy.memmap", viewed), mock.patch("gguf.get_tensor_name_map", table):
        yield


@pytest.fixture(scope="session")
def default_reference(default_gguf: Path) -> torch.nn.Module:
    """The default model as transformers reads the same file, in float32; takes ten seconds."""
    import torch
    import transformers

    with torch.inference_mode(), faster_gguf():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            default_gguf.parent, gguf_file=default_gguf.name, dtype=torch.float32
        )
    return model.eval()
