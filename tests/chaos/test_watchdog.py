"""An engine that hangs or is stopped: health fails, its stacks are in the log, and it is replaced."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.serve.conftest import Server, running, wait_until


def is_ready(server: Server) -> bool:
    return server.http.get("/health/ready").status_code == 200


def test_stopped_and_stuck_engines_log_their_stacks(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with running(hang_timeout=0.8) as server, ThreadPoolExecutor(1) as pool:
        # A stopped engine gets the signal and exceeds its own timer at once: both dumps are mixed.
        for fault, part in (("stopped", "  File "), ("stuck", "in _inject_fault")):
            pid = server.client.replicas[0].pid
            if fault == "stopped":
                os.kill(pid or 0, signal.SIGSTOP)
            else:
                stuck = pool.submit(server.complete, prompt="HANG")
            wait_until(lambda: not is_ready(server))
            wait_until(lambda pid=pid: server.client.replicas[0].pid not in (pid, None))
            assert part in capfd.readouterr().err
            assert "the engine hung (no heartbeat for" in caplog.text
            assert "its stacks follow" in caplog.text
            caplog.clear()
            wait_until(lambda: is_ready(server))
        assert stuck.result(60).status_code == 503
        assert server.complete(max_tokens=2).status_code == 200
