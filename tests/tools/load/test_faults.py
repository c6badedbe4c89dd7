"""Servers that die, reject requests or send invalid data; finished measurements are kept."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tools.conftest import Windlass
from tests.tools.load.fake_server import RETRY_AFTER_S, fake_server

SMALL = ("--num-prompts", 12, "--input-len", 8, "--output-len", 4, "--max-concurrency", 2)


def row_of(path: Path) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(path.read_text())["rows"][0]
    return row


def test_a_server_that_dies_ends_the_run_and_keeps_it(windlass: Windlass, tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    with fake_server(num_good=5, then="dies") as server:
        shown = windlass("bench", "serve", "--base-url", server.url, *SMALL, "-o", output, code=1)
    row = row_of(output)
    assert row["completed"] in (4, 5)  # one may have been in flight
    assert row["failed"] >= 1
    assert row["num_left"] == 12 - row["completed"] - row["failed"]
    assert "stopped responding" in row["stopped"]
    assert "Ended early: the server stopped responding." in shown
    assert "connection lost" in shown


def test_429_is_counted_or_retried(
    windlass: Windlass, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, sleep, pauses = tmp_path / "r.json", asyncio.sleep, []

    async def recorded(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", recorded)
    with fake_server(num_good=4, then="busy") as server:
        shown = windlass("bench", "serve", "--base-url", server.url, *SMALL, "-o", output)
        row = row_of(output)
        assert (row["completed"], row["failed"], row["num_rejected"]) == (4, 8, 8)
        assert "8 failed: HTTP 429 (Retry-After: 0.05): the queue is full" in shown
        assert RETRY_AFTER_S not in pauses
        words = (*SMALL, "--max-retries", 2, "-o", output)
        windlass("bench", "serve", "--base-url", server.url, *words, code=1)
    row = row_of(output)
    assert (row["completed"], row["num_rejected"]) == (0, 36)
    assert pauses.count(RETRY_AFTER_S) == 12 * 2  # every request before each of its retries


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("garbage", "3 failed: a chunk of the stream cannot be parsed"),
        ("sends error", "3 failed: the stream contains an error: out of memory"),
        ("cuts", "3 failed: the stream ended before the response was complete"),
        ("plain", "3 failed: the server does not stream"),
    ],
)
def test_invalid_responses_fail(
    windlass: Windlass, tmp_path: Path, fault: str, message: str
) -> None:
    output = tmp_path / "r.json"
    with fake_server(num_good=9, then=fault) as server:
        shown = windlass("bench", "serve", "--base-url", server.url, *SMALL, "-o", output)
    assert message in shown
    assert (row_of(output)["completed"], row_of(output)["failed"]) == (9, 3)


def test_a_connection_closed_on_reuse_is_retried(windlass: Windlass, tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    with fake_server(num_good=6, then="hangs up") as server:
        windlass("bench", "serve", "--base-url", server.url, *SMALL, "-o", output)
        assert server.faults.num_tried == 13
    assert (row_of(output)["completed"], row_of(output)["failed"]) == (12, 0)


def test_slow_requests_time_out(windlass: Windlass) -> None:
    words = ("--num-prompts", 2, "--input-len", 8, "--output-len", 50, "--request-timeout", 0.2)
    with fake_server(step_s=0.1) as server:
        shown = windlass("bench", "serve", "--base-url", server.url, *words, code=1)
    assert "2 failed: not done after 0.2 s" in shown


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Restore the handler of ctrl-C, which tests in the background ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_keeps_finished_measurements(windlass: Windlass, tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    with fake_server(step_s=0.05) as server:

        def press() -> None:
            while server.faults.num_tried < 5:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=press)
        thread.start()
        words = (*SMALL, "-o", output, "-o", tmp_path / "r.csv")
        shown = windlass("bench", "serve", "--base-url", server.url, *words, code=130)
        thread.join()
    row = row_of(output)
    assert row["stopped"] == "interrupted"
    assert 2 <= row["completed"] < 12
    assert row["completed"] + row["num_left"] == 12
    assert row["request_throughput"] > 0
    assert "Ended early: interrupted" in shown
    assert (tmp_path / "r.csv").read_text().count("\n") == 2


def test_invalid_options_are_rejected_before_anything_is_sent(
    windlass: Windlass, tmp_path: Path
) -> None:
    with fake_server() as server:

        def rejected(*words: object, url: str = server.url) -> str:
            ready = ("--ready-check-timeout-sec", 0)
            return windlass("bench", "serve", "--base-url", url, *ready, *words, code=2)

        assert "has no model 'gpt'. It has: fake." in rejected("--model", "gpt")
        assert "--goodput 'ttft'" in rejected("--goodput", "ttft")
        assert "--base-url 'nowhere'" in rejected(url="nowhere")
        assert "--dataset-name 'poems' is not known" in rejected("--dataset-name", "poems")
        assert "needs --dataset-path" in rejected("--dataset-name", "custom")
        rag = ("--dataset-name", "rag", "--turns", "2")
        assert "--turns has no effect with --dataset-name rag" in rejected(*rag)
        assert "--request-rate 'fast'" in rejected("--request-rate", "fast")
        assert "both be a sweep" in rejected("--request-rate", "1,2", "--max-concurrency", "1,2")
        assert "auto needs targets" in rejected("--request-rate", "auto")
        assert "only with --request-rate auto" in rejected("--goodput-share", "0.9")
        auto = ("--request-rate", "auto", "--goodput", "ttft:9")
        assert "up to 1, got 2" in rejected(*auto, "--goodput-share", "2")
        assert "both be a sweep" in rejected(*auto, "--max-concurrency", "1,2")
        assert "--probe-request-rate cannot be -1" in rejected("--probe-request-rate", "-1")
        assert "--backend 'tgi'" in rejected("--backend", "tgi")
        assert "--percentile-metrics 'x'" in rejected("--percentile-metrics", "x")
        assert "ends in .json, .csv, .html" in rejected("-o", "result.txt")
        assert "is not JSON" in rejected("--extra-body", "{")
        assert "--ramp-up-strategy needs" in rejected("--ramp-up-strategy", "linear")
        assert "--skip-bad-lines have no effect" in rejected("--skip-bad-lines")
        assert "--result-dir" in rejected("--result-dir", tmp_path)
        ids = tmp_path / "ids.jsonl"
        ids.write_text('{"prompt": [1, 2]}')
        words: tuple[object, ...] = ("--workload", "custom", "--dataset-path", ids)
        assert "a chat endpoint does not accept prompts of token ids" in rejected(*words)
        trace = tmp_path / "t.jsonl"
        trace.write_text('{"timestamp": 0, "prompt": "a"}\n{"timestamp": "x", "prompt": "b"}\n')
        words = ("--dataset-name", "timed_trace", "--dataset-path", trace)
        assert "line 2: \"timestamp\" is 'x'" in rejected(*words)
        assert server.faults.bodies == []
        words = (*words, "--skip-bad-lines", "--output-len", 2)
        shown = windlass("bench", "serve", "--base-url", server.url, *words)
        assert "skipped: line 2" in shown
        assert len(server.faults.bodies) == 1


def test_no_server_at_the_url(windlass: Windlass) -> None:
    words = ("--base-url", "http://127.0.0.1:9", "--ready-check-timeout-sec", 0)
    shown = windlass("bench", "serve", *words, code=1)
    assert "no server is ready at http://127.0.0.1:9" in shown


def test_requests_contain_the_options(windlass: Windlass) -> None:
    words = (
        "--num-prompts",
        1,
        "--input-len",
        8,
        "--output-len",
        3,
        "--endpoint",
        "/v1/completions",
    )
    more = ("--temperature", 0.5, "--ignore-eos", "--extra-body", '{"top_k": 7}')
    with fake_server() as server:
        windlass("bench", "serve", "--base-url", f"{server.url}/v1", *words, *more)
        (body,) = server.faults.bodies
    assert isinstance(body.pop("prompt"), str)
    assert body == {
        "model": "fake",
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "ignore_eos": True,
        "top_k": 7,
    }
