"""The breakdown of http_rate.py --trace on a run of two requests."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "scripts"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


def test_steps_are_shown_by_kind_with_idle_time(capsys: pytest.CaptureFixture[str]) -> None:
    from http_breakdown import Window, show_steps

    engine = {
        "spans": {
            "submit": [(1.0, 1.001, 2, 16), (1.004, 1.005, 2, 0), (2.0, 2.001, 2, 0)],
            "wait": [(1.005, 1.01), (1.01, 1.02), (2.001, 2.01)],
            "commit": [(1.01, 1.011), (1.02, 1.021), (2.01, 2.011)],
            "plan": [(0.999, 1.0)],
        },
        "device": [(1.0, 1.010), (1.011, 1.020), (2.0, 2.010)],
    }
    show_steps(engine, Window(0.9, 3.0), num_waves=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:5] == ["decode", "2", "2", "0", "9.500"]
    assert lines[2].split()[:5] == ["prompts", "1", "2", "16", "10.000"]
    assert "490.0 ms idle without work, 0.5 ms idle between steps" in lines[3]


def test_the_way_of_a_request_begins_at_the_last_token_of_the_one_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from http_breakdown import STAGES, ClientRequest, show_way

    requests = [
        ClientRequest(client=0, request_id=name, began=start, first=start + 0.5, ended=start + 0.9)
        for name, start in (("a", 0.0), ("b", 1.0))
    ]
    stages: dict[str, dict[str, float]] = {name: {} for name in STAGES}
    for i, name in enumerate(STAGES):
        stages[name]["a"] = 0.8 + 0.01 * i  # the end of a: the stages before the next request
        stages[name]["b"] = 1.0 + 0.01 * i
    stages["planned"]["a"], stages["last_token"]["b"] = 0.1, 1.8
    show_way([{"stages": stages}], requests)
    lines = {
        line.split("  ")[1].strip(): line.split() for line in capsys.readouterr().out.splitlines()
    }
    assert lines["client_ended"][1] == "70.00"  # 0.9 - 0.83
    assert lines["last_token to planned"][4] == "320.00"  # from 0.8 to 1.12
