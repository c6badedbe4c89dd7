"""Python's collector does not look at what steps make: they drop it all themselves."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runner.test_deterministic import CONFIG
from windlass import LLM, SamplingParams


@pytest.fixture
def usual_collector() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def engine_of(folder: Path) -> LLM:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return LLM(
        str(folder),
        load_format="dummy",
        device="cpu",
        num_blocks=600,
        max_num_seqs=64,
        block_size=16,
    )


@pytest.mark.usefixtures("usual_collector")
def test_hundreds_of_rows_run_without_a_garbage_collection(tmp_path: Path) -> None:
    llm = engine_of(tmp_path)
    prompts = [[i + 1, 2, 3] for i in range(64)]
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0)
    seen: list[str] = []

    def count(phase: str, _info: dict[str, int]) -> None:
        seen.append(phase)

    gc.callbacks.append(count)
    try:
        results = llm.generate(prompts, sampling)
    finally:
        gc.callbacks.remove(count)
    assert len(results) == 64
    assert not seen


@pytest.mark.usefixtures("usual_collector")
def test_a_disabled_garbage_collector_stays_disabled(tmp_path: Path) -> None:
    gc.set_threshold(0)
    engine_of(tmp_path)
    assert gc.get_threshold()[0] == 0


_FIRST_ENGINE = """
import gc, sys, weakref
from windlass import LLM
llm = LLM(sys.argv[1], load_format="dummy", device="cpu", num_blocks=8)
llm.generate([[1, 2, 3]])
freed = weakref.ref(llm)
del llm
sys.exit(freed() is not None)
"""


def test_the_engine_that_imports_torch_is_freed(tmp_path: Path) -> None:
    """In a process that has not imported torch: its import must not keep the caller's objects."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    command = [sys.executable, "-c", _FIRST_ENGINE, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
