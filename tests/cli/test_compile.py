"""`windlass compile`: fills the caches of compiled kernels, and says what it compiled and where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Invoke
from windlass.kernels.native import compiled
from windlass.lora import packing
from windlass.tools import compile as tool

SOURCE = 'extern "C" const char* windlass_simd() { return "none"; }'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and kernels that compile quickly."""
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "kernels.cpp").write_text(SOURCE)
    load = compiled.load
    monkeypatch.setattr(tool, "load", lambda **_: load(sources=sources))
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_kernels_of_a_cpu(windlass: Invoke, cache: Path) -> None:
    first = windlass("compile", "--device", "cpu")
    assert first.code == 0
    assert first.out.startswith("CPU kernels: compiled (none) in ")
    assert str(cache / "native") in first.out
    second = windlass("compile", "--device", "cpu", "--json")
    (found,) = json.loads(second.out)
    assert found["what"] == "CPU kernels"
    assert found["how"] == "found (none)"
    assert found["seconds"] == 0
    assert Path(found["where"]).is_file()


@pytest.mark.usefixtures("cache")
def test_the_output_names_the_device_and_why(
    windlass: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = windlass("compile")
    assert found.out.endswith("; device: cpu (torch sees no CUDA device)\n")
    chosen = windlass("compile", "--device", "cpu", "--json")
    assert json.loads(chosen.out)[0]["device"] == "cpu (as set)"


@pytest.mark.usefixtures("cache")
def test_the_loader_of_adapters_is_compiled_with_lora(windlass: Invoke) -> None:
    outcome = windlass("compile", "--device", "cpu", "--enable-lora", "--json")
    assert [each["what"] for each in json.loads(outcome.out)] == ["adapter loader", "CPU kernels"]
    assert packing.SOURCES.is_dir()


@pytest.mark.usefixtures("cache")
def test_what_needs_no_kernels_is_refused(windlass: Invoke) -> None:
    for flags in (("--plain-kernels",), ("--dtype", "bfloat16")):
        outcome = windlass("compile", "--device", "cpu", *flags)
        assert outcome.code == 2
        assert "nothing is compiled then" in outcome.err
    outcome = windlass("compile", "/no/such/model", "--device", "cpu")
    assert outcome.code == 2
    assert "/no/such/model" in outcome.err
    outcome = windlass("compile", "--device", "cuda")
    assert outcome.code == 2
    assert "no CUDA device" in outcome.err


def test_a_cache_that_cannot_be_written_is_an_error(
    windlass: Invoke, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(mode=0o700)
    (cache / "file").write_text("")
    monkeypatch.setenv("WINDLASS_CACHE", str(cache / "file" / "below"))
    outcome = windlass("compile", "--device", "cpu")
    assert outcome.code == 2
    assert "cannot be written" in outcome.err
    assert "set WINDLASS_CACHE" in outcome.err
