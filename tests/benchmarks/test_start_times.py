"""benchmarks/scripts/start_times.py reads the server's table and evicts a copy of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import start_times

from tests.serve.fakes import Options, build_engine
from windlass.cli.report import print_report


def test_the_phases_of_the_start_up_table_are_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    _, report = build_engine(Options())
    report.seconds.update({"load weights": 1.25, "KV cache": 0.5})
    print_report(report)
    found = start_times.phases_of(capsys.readouterr().out.splitlines())
    assert found.items() >= {"load weights": 1.25, "KV cache": 0.5}.items()


def test_a_model_is_copied_and_stays_readable_after_its_eviction(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "model.safetensors").write_bytes(b"x" * 10_000)
    copy = start_times.copy_files(source, tmp_path / "copy")
    start_times.evict(copy)
    assert (copy / "model.safetensors").read_bytes() == b"x" * 10_000
