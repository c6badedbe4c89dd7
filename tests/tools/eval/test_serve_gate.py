"""The quality gate of a server: it does not start if a limit is missed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from windlass import start
from windlass.cli.main import app

Serve = Callable[..., tuple[int, str]]


@pytest.fixture
def serve(toy: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Run `windlass serve` up to the start of the server, which exits with code 77."""
    monkeypatch.setattr(start, "serve", lambda *_, **__: 77)

    def run(*args: object) -> tuple[int, str]:
        fixed = ["serve", toy, "--load-format", "dummy", "--num-threads", "1"]
        chosen = [text_file if arg == "TEXT" else arg for arg in args]
        result = CliRunner().invoke(app, list(map(str, [*fixed, *chosen])))
        return result.exit_code, " ".join(result.stderr.split())

    return run


GATE = ("--gate-data", "TEXT", "--gate-context", 64, "--gate-max-windows", 2)


def test_missed_gate_prevents_start(serve: Serve) -> None:
    other = ("--gate-against-options", "load_format=dummy,seed=1")
    code, errors = serve(*GATE, *other, "--min-agreement", "99%")
    assert code == 1
    assert "the quality gate was missed: top-1 agreement" in errors


def test_passed_gate_starts_the_server(serve: Serve) -> None:
    same = ("--gate-against-options", "load_format=dummy")
    code, errors = serve(*GATE, *same, "--min-agreement", "99%", "--max-ppl-increase", "0.3%")
    assert code == 77
    assert "quality gate passed" in errors


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--min-agreement", "0.9"], "give --gate-data"),
        (["--gate-data", "TEXT"], "--gate-data needs a limit"),
        (["--gate-data", "absent.jsonl", "--max-kl", "1"], "no such file or folder"),
        (["--gate-data", "TEXT", "--max-kl", "-1"], "--max-kl must be at least 0"),
    ],
)
def test_invalid_gate_is_refused(serve: Serve, args: list[str], message: str) -> None:
    code, errors = serve(*args)
    assert code == 2
    assert message in errors
