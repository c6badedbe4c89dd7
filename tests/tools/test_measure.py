"""The decode window, bytes per step, and secrets in records."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from windlass.core.moe import Routing
from windlass.core.types import Output, Timeline
from windlass.tools.common.device import Traffic
from windlass.tools.common.drive import StepLog
from windlass.tools.common.record import Record


def _first(name: str) -> Output:
    return Output(name, [1], timeline=Timeline())


def _last(name: str) -> Output:
    return Output(name, [1], timeline=Timeline(), finish="length")


def test_the_window_lasts_from_the_last_start_to_the_first_end() -> None:
    log = StepLog(2)
    steps = [
        [_first("a")],
        [Output("a", [1]), _first("b")],
        [Output("a", [1]), Output("b", [1, 1])],
        [_last("a"), Output("b", [1])],
        [_last("b")],
    ]
    for second, outputs in enumerate(steps):
        log.add(outputs, float(second))
    window = log.window(num_prompt=100)
    assert window is not None
    assert (window.seconds, window.steps, window.tokens) == (2.0, 2, 5)
    assert window.step_s == 1.0
    assert window.mean_kv == 100 + 3 + 2.5


def test_there_is_no_window_if_a_request_ends_before_another_starts() -> None:
    log = StepLog(2)
    for second, outputs in enumerate([[_first("a")], [_last("a")], [_first("b")], [_last("b")]]):
        log.add(outputs, float(second))
    assert log.window(10) is None


def test_a_step_reads_weights_and_kv_cache() -> None:
    assert Traffic(1000, 2.5).step_bytes(10, 4) == 1025


def test_a_step_reads_the_experts_that_its_rows_choose():
    traffic = Traffic(1000, 0.0, expert_bytes=800, routing=Routing(num_experts=8, top_k=2))
    assert traffic.step_bytes(0, 1) == 1200
    assert pytest.approx(traffic.step_bytes(0, 2)) == 1350
    assert 1799 < traffic.step_bytes(0, 64) < 1800


def test_a_record_contains_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["/bin/windlass", "bench", "--hf-token", "s3cret", "--hf-token=s3cret", "a b"]
    monkeypatch.setattr(sys, "argv", words)
    path = tmp_path / "new" / "record.json"
    Record("throughput", [{"workload": "mixed"}], settings={"hf_token": "s3cret"}).save(path)
    stored = json.loads(path.read_text())
    assert "s3cret" not in path.read_text()
    assert stored["command"] == "windlass bench --hf-token '***' '--hf-token=***' 'a b'"
    assert stored["settings"] == {}
    assert {"python", "torch"} <= stored["versions"].keys()
