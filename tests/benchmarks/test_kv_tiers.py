"""The benchmark of KV tiers runs all phases, and records what was loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import kv_tiers
import pytest

from windlass.tools.common.record import read_record


@pytest.mark.slow
def test_on_a_cpu(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    sizes = ["--conversations", "5", "--length", "96", "--turns", "2", "--new-tokens", "8"]
    options = [
        "--device",
        "cpu",
        "--load-format",
        "dummy",
        "--tiers",
        "none,host",
        "--check",
        "--output-tokens",
        "4",
    ]
    monkeypatch.setattr(sys, "argv", ["kv_tiers.py", str(tiny), *sizes, *options, "-o", str(path)])
    kv_tiers.main()
    rows = {(row["tier"], row["phase"]): row for row in read_record(path).rows}
    assert [*rows] == [(tier, phase) for tier in ("none", "host") for phase in ("first", "later")]
    none, host = rows["none", "later"], rows["host", "later"]
    assert none["requests"] == host["requests"] == 5
    assert none["cached_tokens"] < host["cached_tokens"]
    assert host["host_hit_tokens"] > 0
    assert none["ratio"] == 1


def test_a_conversation_that_is_too_short_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["kv_tiers.py", "--length", "64", "--turns", "9"])
    with pytest.raises(SystemExit, match="too short"):
        kv_tiers.main()
