"""Requests that schemathesis derives from /openapi.json: no hang, and no 5xx but for missed deadlines."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.test_libraries import PYTHON
from tests.serve.conftest import Server, running

ADMIN_KEY = "admin-of-the-test"
# A deadline of a few milliseconds is a valid field, and 504 its answer.
SETTINGS = """[checks]
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "504"]
"""
SCHEMATHESIS = PYTHON.with_name("schemathesis")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    data = tmp_path_factory.mktemp("data")
    with running(admin_key=(ADMIN_KEY,), data_dir=str(data)) as server:
        yield server


@pytest.mark.skipif(not SCHEMATHESIS.exists(), reason="make test-clients installs the libraries")
def test_no_described_request_causes_a_5xx(server: Server, tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(SETTINGS)
    command = [
        SCHEMATHESIS,
        "run",
        f"{server.url}/openapi.json",
        "--checks=not_a_server_error",
        "--phases=examples,coverage,fuzzing",
        "--exclude-path-regex=sleep|wake",  # while the server sleeps, 503 is the right answer
        "--max-examples=5",
        "--max-time=150",
        "--seed=1",
        "--no-shrink",
        "--request-timeout=30",
        f"--header=Authorization:Bearer {ADMIN_KEY}",
        "--generation-database=none",
        "--continue-on-failure",
    ]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-1000:]
    assert server.complete(max_tokens=2).status_code == 200
