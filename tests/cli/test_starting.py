"""What commands show before a model is ready, and while CPU kernels are compiled."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Invoke
from windlass.build_rank import BuildLog
from windlass.cli.starting import starting
from windlass.kernels.native import compiled
from windlass.start_log import start_log


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_current_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = _Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with starting("tiny"):
        start_log.info("load weights")
        start_log.info("")
    clear = "\r\x1b[K"
    phases = [f"{clear}loading tiny: {phase} …" for phase in ("import", "load weights")]
    assert screen.getvalue() == "".join([*phases, clear, clear])
    assert start_log.handlers == []


def test_other_outputs_get_one_line(bare_model: Path, windlass: Invoke) -> None:
    flags = ("--load-format", "dummy", "--device", "cpu", "--max-tokens", "1")
    outcome = windlass("generate", str(bare_model), "-p", "x", *flags)
    assert outcome.err.startswith(f"loading {bare_model}\n")
    assert (
        "loading"
        not in windlass("generate", str(bare_model), "-p", "x", *flags, "--no-progress").err
    )


def test_a_text_taken_for_a_model_is_named(windlass: Invoke) -> None:
    outcome = windlass("generate", "What is a windlass?")
    assert outcome.code == 2
    assert "'What is a windlass?' was taken for the model; a prompt follows -p." in outcome.err
    assert "taken" not in windlass("generate", "org/name").err


SOURCE = 'extern "C" const char* windlass_simd() { return "none"; }'


@pytest.mark.parametrize("is_terminal", [False, True])
def test_compiling_says_so_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_terminal: bool,
) -> None:
    if not compiled.find_compilers()[0]:
        pytest.skip("no C++ compiler")
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "a.cpp").write_text(SOURCE)
    screen = _Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    built = compiled.load(tmp_path / "cache", sources=sources)
    text = "compiling CPU kernels for this machine, once"
    assert built.compile_s > 0
    assert text in (screen.getvalue() if is_terminal else caplog.text)
    caplog.clear()
    again = compiled.load(tmp_path / "cache", sources=sources)
    assert (again.compile_s, caplog.text) == (0.0, "")


def test_compiling_is_a_phase_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "windlass")
    log = BuildLog(seconds={"import torch": 1.0, "load weights": 9.0})
    log.split_off("compile CPU kernels", 7.0, "load weights")
    assert log.seconds == {"import torch": 1.0, "compile CPU kernels": 7.0, "load weights": 2.0}
    log.split_off("compile CPU kernels", 0.0, "load weights")
    with log.phase("KV cache"):
        pass
    assert list(log.seconds) == ["import torch", "compile CPU kernels", "load weights", "KV cache"]
    assert caplog.messages == ["KV cache"]


def test_a_phase_inside_another_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 11.0, 15.0, 16.0, 18.0, 18.5])
    monkeypatch.setattr("windlass.build_rank.time.perf_counter", lambda: next(times))
    log = BuildLog()
    with log.phase("KV cache"):
        with log.phase("compile kernels"):
            pass
        with log.phase("capture CUDA graphs"):
            pass
    assert log.seconds == {"KV cache": 2.5, "compile kernels": 4.0, "capture CUDA graphs": 2.0}
