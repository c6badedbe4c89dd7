"""rerun.py runs the commands of records again."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from typing import Any

import pytest

from windlass.tools.common.record import Record

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "scripts"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


def write(folder: Path, name: str, command: str) -> Path:
    path = folder / f"{name}.json"
    Record("throughput", [{"x": 1}], command=command).save(path)
    return path


def test_a_command_is_run_as_recorded_with_another_output(tmp_path: Path) -> None:
    from rerun import command_of

    text = "windlass bench throughput model --repeat 1 -o old.json --workload decode_b1"
    path = write(tmp_path, "fast", text)
    start = [sys.executable, "-m", "windlass.cli", "bench", "throughput", "model"]
    end = ["--repeat", "1", "--workload", "decode_b1", "-o", "new/fast.json"]
    assert command_of(path, Path("new/fast.json")) == [*start, *end]
    for other in ("python benchmarks/scripts/x.py -o old.json", "windlass a; the same with b"):
        assert command_of(write(tmp_path, "other", other), Path("new.json")) is None


def test_failures_are_named_and_the_other_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import rerun

    names = ("bad", "good", "odd", "slow")
    paths = [write(tmp_path, name, f"windlass bench {name}") for name in names]
    write(tmp_path, "odd", "something else")
    ran = []

    def run(command: list[str], timeout: float | None, check: bool) -> CompletedProcess[Any]:
        assert not check
        ran.append(command[4])
        if command[4] == "slow":
            raise TimeoutExpired(command, timeout or 0)
        return CompletedProcess(command, int(command[4] == "bad"))

    monkeypatch.setattr(rerun.subprocess, "run", run)
    failed = rerun.rerun(paths, tmp_path / "new", 5.0)
    assert ran == ["bad", "good", "slow"]
    assert failed == [
        "bad: exit 1",
        "odd: not made by one command of windlass",
        "slow: not done after 5 s",
    ]
