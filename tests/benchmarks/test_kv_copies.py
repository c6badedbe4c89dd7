"""The benchmark of KV copies measures and records every direction, on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import kv_copies
import pytest

from windlass.tools.common.record import read_record


def test_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "record.json"
    options = ["--device", "cpu", "--block-size", "1", "--num-blocks", "4", "-o", str(path)]
    monkeypatch.setattr(sys, "argv", ["kv_copies.py", *options])
    kv_copies.main()
    rows = read_record(path).rows
    found = {(row["kv"], row["copy"], row["blocks"], row["rows"]) for row in rows if "rows" in row}
    assert found == {
        (kv, copy, blocks, place)
        for kv in ("bf16", "fp8")
        for copy in ("read", "write")
        for blocks in (1, 4)
        for place in ("consecutive", "scattered")
    }
    assert all(row["gb_s"] > 0 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
