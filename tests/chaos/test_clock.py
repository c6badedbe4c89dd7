"""Jumps of the wall clock: only monotonic clocks drive timeouts."""

from __future__ import annotations

import ast
import itertools
import time
from pathlib import Path

import pytest

import windlass
from tests.serve.conftest import running, wait_until
from tests.serve.fakes import Options, build_engine
from windlass.core.card import EngineReport
from windlass.engine import Engine

PACKAGE = Path(windlass.__file__).parent

# Modules that may read the wall clock, and what for.
WALL_CLOCK = {
    "serve/batch/store.py": "records of files and batches, which outlive the process, and their expiry",
    "serve/console_routes.py": "times that the console shows",
    "serve/keys.py": "the dates on which keys expire",
    "serve/openai_format.py": "the field `created`",
    "serve/otel.py": "times of spans, from one offset to the monotonic clock",
    "serve/pooling.py": "the field `created`",
    "serve/prefixes.py": "the field `created` of named prefixes, which outlive the process",
    "serve/responses_format.py": "the field `created_at`",
    "serve/services.py": "the time of the start, for /v1/models",
    "serve/usage.py": "times of usage records",
}


def reads_wall_clock(path: Path) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr in ("time", "time_ns")
        and isinstance(node.value, ast.Name)
        and node.value.id == "time"
        for node in ast.walk(ast.parse(path.read_text()))
    )


def test_timeouts_use_no_wall_clock() -> None:
    folders = [PACKAGE / name for name in ("serve", "core", "text", "parallel", "runner")]
    files = [*PACKAGE.glob("*.py"), *(path for each in folders for path in each.rglob("*.py"))]
    found = {str(path.relative_to(PACKAGE)) for path in files if reads_wall_clock(path)}
    assert found <= WALL_CLOCK.keys(), (
        f"{sorted(found - WALL_CLOCK.keys())} read the wall clock, which jumps: measure times with "
        "time.monotonic, or add the module to WALL_CLOCK with the reason"
    )


def jump() -> None:
    """Let the wall clock of this process jump by hours with every call, forwards and backwards."""
    real, jumps = time.time, itertools.cycle([0.0, 36e3, -72e3])
    time.time = lambda: real() + next(jumps)  # type: ignore[assignment]


def jumping_build() -> tuple[Engine, EngineReport]:
    jump()
    return build_engine(Options())


@pytest.mark.slow
def test_a_server_whose_clock_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", time.time)  # restored at the end
    jump()
    with running(jumping_build, hang_timeout=2.0, keep_alive_timeout=5.0) as server:
        pid = server.client.replicas[0].pid
        texts = {server.complete(max_tokens=30).json()["choices"][0]["text"] for _ in range(10)}
        assert len(texts) == 1
        slow = server.complete(prompt="SLOW", max_tokens=250, stream=True)  # longer than a timeout
        assert slow.text.endswith("data: [DONE]\n\n")
        assert server.http.get("/health/ready").status_code == 200
        assert server.client.replicas[0].pid == pid
        wait_until(lambda: server.metric("requests_in_flight") == 0)
        assert server.metric("request_outcomes_total", outcome="success") == 11
