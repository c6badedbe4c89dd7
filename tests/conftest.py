"""Fixtures that several packages share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from tests import warm_start
from windlass.config import ModelConfig
from windlass.models.source import resolve

if TYPE_CHECKING:
    import torch

# Threads of torch that wait would spin, also in child processes, and take the cores from those that
# compute: with two programs on two cores, small operations are 50 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if find_spec("hypothesis") is not None:  # the tests for GPUs run without it
    from hypothesis import settings

    # No test depends on the wall clock: a busy machine may take any time for an example.
    settings.register_profile("any speed", deadline=None)
    settings.load_profile("any speed")

if sys.platform == "linux" and not Path("/dev/nvidiactl").exists():
    warm_start.enable()

gc.disable()  # collecting the tests imports all modules and makes ten thousand items, which stay


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def default_gguf() -> Path:
    """The file of the default model, downloaded into the user's cache if missing."""
    return resolve(ModelConfig()).path


@contextmanager
def faster_gguf() -> Iterator[None]:
    """Make transformers read a GGUF faster: it reads every vocabulary entry from a memory map, which
    is slower than a view of it, and it builds one name table per module.
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
    """The default model as transformers reads the same file, in float32; takes ten seconds to load."""
    import torch
    import transformers

    with torch.inference_mode(), faster_gguf():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            default_gguf.parent, gguf_file=default_gguf.name, dtype=torch.float32
        )
    return model.eval()
