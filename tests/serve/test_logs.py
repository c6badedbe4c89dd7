"""What a running server logs: refusals, throughput, restarts; as text and as JSON."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests import warm_start
from tests.serve.conftest import Server, wait_until
from windlass.core.types import EngineStats
from windlass.serve.logs import _AtMost
from windlass.serve.throughput_log import ThroughputLog

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_limit_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the filter that a command in this process may have set."""
    monkeypatch.setattr(logging.getLogger("windlass.refused"), "filters", [])


def test_a_refusal_is_one_line(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "windlass")
    headers = {"X-Request-Id": "mine-1"}
    body = {"prompt": "x", "temperature": -1}
    assert server.http.post("/v1/completions", json=body, headers=headers).status_code == 400
    assert (
        server.http.post("/v1/completions", json={"prompt": "x", "model": "no"}).status_code == 404
    )
    assert server.http.get("/nowhere").status_code == 404
    lines = [record for record in caplog.records if record.name == "windlass.refused"]
    assert [record.fields for record in lines] == [  # type: ignore[attr-defined]
        {"status": 400, "path": "/v1/completions", "field": "temperature", "id": "mine-1"},
        {"status": 404, "path": "/v1/completions", "field": "model"},
        {"status": 404, "path": "/nowhere"},
    ]
    text = lines[0].getMessage()
    assert text.startswith("answered 400, field 'temperature', id 'mine-1' to /v1/completions: ")


def test_a_refusal_of_a_prepared_request_has_its_id(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "windlass")
    body = {"prompt": "x", "include_cost": True, "request_id": "bill"}
    assert server.http.post("/v1/completions", json=body).status_code == 400
    (line,) = [record for record in caplog.records if record.name == "windlass.refused"]
    assert line.fields["id"] == "cmpl-bill"  # type: ignore[attr-defined]


def test_refusals_cannot_fill_the_disk() -> None:
    limit = _AtMost(2)

    def passes(created: float) -> str | None:
        record = logging.LogRecord("windlass.refused", logging.INFO, "", 0, "%s", ("no",), None)
        record.created = created
        return record.getMessage() if limit.filter(record) else None

    assert [passes(5.0 + n / 10) for n in range(5)] == ["no", "no", None, None, None]
    assert passes(6.0) == "no (3 more were not logged)"
    assert passes(6.1) == "no"


def _stats(**values: int) -> EngineStats:
    return EngineStats(num_blocks=100, **values)


def test_throughput_is_the_difference_between_two_looks() -> None:
    log = ThroughputLog(num_replicas=1)
    assert log.rates([_stats()], 10) is None
    counters = {"num_prompt_tokens_computed": 50, "num_generated_tokens": 200}
    queries = {"prefix_queries": 40, "prefix_hits": 10}
    busy = _stats(num_running=2, num_waiting=1, num_used_blocks=25, **counters, **queries)
    assert log.rates([busy], 10) == {
        "prompt_tokens_per_s": 5.0,
        "generated_tokens_per_s": 20.0,
        "running": 2,
        "waiting": 1,
        "kv_cache_percent": 25.0,
        "prefix_hit_percent": 25.0,
    }
    idle = _stats(**counters, **queries)
    last = log.rates([idle], 10)
    assert last is not None
    assert (last["generated_tokens_per_s"], last["running"]) == (0.0, 0)
    assert log.rates([idle], 10) is None  # an idle server is silent


def test_a_restarted_engine_counts_from_zero() -> None:
    log = ThroughputLog(num_replicas=2)
    log.rates([_stats(num_generated_tokens=500), _stats(num_generated_tokens=100)], 1)
    drafts = {"num_draft_tokens": 8, "num_accepted_tokens": 6}
    rates = log.rates(
        [_stats(num_generated_tokens=30), _stats(num_generated_tokens=110, **drafts)], 1
    )
    assert rates is not None
    assert (rates["generated_tokens_per_s"], rates["accepted_draft_percent"]) == (40.0, 75.0)


PROGRAM = """
from tests.serve.fakes import CARD, counting
from windlass.serve.client import EngineClient
from windlass.serve.launch import serve
from windlass import start

def fake_serve(_config, serve_config, _on_ready, **_sources):
    client = EngineClient(counting())
    def on_ready(_report, url):
        print(url, client.replicas[0].pid, flush=True)
    return serve(client, lambda: CARD, serve_config, on_ready)

if __name__ == "__main__":
    start.serve = fake_serve
    from windlass.cli.main import app
    app()
"""


def test_a_json_log_of_a_whole_life(tmp_path: Path) -> None:
    """Each line is an object: a foreign flag, throughput, a refusal, a restart, the end."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    flags = ["--log-format", "json", "--log-stats-interval", "0.05", "--enable-metrics"]
    command = [sys.executable, str(program), "serve", "--port", "0", *flags]
    log = tmp_path / "log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def lines() -> list[dict[str, object]]:
        return [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]

    def has(text: str) -> bool:
        return any(text in str(line["message"]) for line in lines())

    with (
        log.open("w") as errors,
        warm_start.start(
            command, stdout=subprocess.PIPE, stderr=errors, env=environment
        ) as process,
    ):
        try:
            assert process.stdout is not None
            url, pid = process.stdout.readline().split()
            body = {"prompt": "x", "max_tokens": 8}
            assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
            wait_until(lambda: has("generation"))
            assert httpx.post(f"{url}/v1/completions", json={}).status_code == 400
            os.kill(int(pid), signal.SIGKILL)
            wait_until(lambda: has("the engine is up again"))
        finally:
            process.terminate()
            process.wait(20)
    assert "GET /metrics is always on" in str(lines()[0]["message"])
    refusal = next(line for line in lines() if line["logger"] == "windlass.refused")
    assert (refusal["status"], refusal["level"]) == (400, "info")
    rates = next(line for line in lines() if "generated_tokens_per_s" in line)
    assert {"time", "level", "logger", "running"} <= rates.keys()
    assert has("shutting down")
