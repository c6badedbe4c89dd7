"""An engine that hangs or is stopped: health fails, its stacks are in the log, and it is replaced."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.serve.conftest import Server, running, wait_until
from tests.serve.tiny_model import serving, write_tiny_model
from windlass.child_process import children_that_dump


def is_ready(server: Server) -> bool:
    return server.http.get("/health/ready").status_code == 200


@pytest.mark.slow
def test_the_ranks_of_a_hung_engine_log_their_stacks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = write_tiny_model(tmp_path)
    with serving(model, serve={"hang_timeout": 3.0}, tensor_parallel_size=2) as server:
        pid = server.client.replicas[0].pid
        assert pid is not None
        [rank] = children_that_dump(pid)
        os.kill(pid, signal.SIGSTOP)
        text = ""

        def has_stacks() -> bool:
            nonlocal text
            text += capfd.readouterr().err
            return "in run_rank" in text

        wait_until(has_stacks)
        assert f"the stacks of rank process {rank} follow" in caplog.text


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
