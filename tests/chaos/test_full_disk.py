"""A disk that is full: logs, recorded traffic and uploads fail, and the server serves on."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import httpx
import pytest

from tests import warm_start
from tests.serve.conftest import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of file sizes")

ROOT = Path(__file__).parents[2]
MAX_BYTES = 2**16  # of every file that the server writes

PROGRAM = """
import resource, sys
from pathlib import Path
from tests.serve.fakes import CARD, counting
from windlass.config import ServeConfig
from windlass.serve.client import EngineClient
from windlass.serve.launch import serve
from windlass.serve.logs import start_logging

def ready(report, url):
    Path(sys.argv[1], "ready").write_text(f"{url} {client.replicas[0].pid}")

if __name__ == "__main__":
    folder, max_bytes = sys.argv[1], int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))
    start_logging("text", "info")
    config = ServeConfig(
        port=0, data_dir=folder + "/data", record_traffic=folder + "/traffic", record_share=1.0,
        enable_log_requests=True,
    )
    client = EngineClient(counting())
    sys.exit(serve(client, lambda: CARD, config, ready))
"""


def test_a_full_disk(tmp_path: Path) -> None:
    program, log, ready = (tmp_path / name for name in ("program.py", "log", "ready"))
    program.write_text(PROGRAM)
    log.write_bytes(b"." * MAX_BYTES)  # no line fits
    with log.open("ab") as file:
        process = warm_start.start(
            [sys.executable, str(program), str(tmp_path), str(MAX_BYTES)],
            stdout=file,
            stderr=file,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    try:
        wait_until(lambda: ready.exists() and " " in ready.read_text())
        url, pid = ready.read_text().split()
        with httpx.Client(base_url=url, timeout=20) as http:
            check(http, int(pid))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    assert log.stat().st_size == MAX_BYTES
    assert (tmp_path / "traffic").stat().st_size <= MAX_BYTES


def check(http: httpx.Client, engine_pid: int) -> None:
    prompt = "x" * 2000

    def complete() -> int:
        body = {"prompt": prompt, "max_tokens": 8}
        return http.post("/v1/completions", json=body).status_code

    assert [complete() for _ in range(40)] == [200] * 40  # more than the recorded traffic may have
    line = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n'
    upload = http.post(
        "/v1/files",
        data={"purpose": "batch"},
        files={"file": ("batch.jsonl", line * (2 * MAX_BYTES // len(line)))},
    )
    assert upload.status_code == 507, upload.text
    os.kill(engine_pid, signal.SIGKILL)
    wait_until(lambda: complete() == 200)  # a new engine starts, and its journal is written
