"""Servers that die, refuse or talk nonsense; what was measured before is always kept."""

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
        said = windlass("bench", "serve", "--base-url", server.url, *SMALL, "-o", output, code=1)
    row = row_of(output)
    assert row["completed"] in (4, 5)  # one may have been under way
    assert row["failed"] >= 1
    assert row["num_left"] == 12 - row["completed"] - row["failed"]
    assert "does not answer any more" in row["stopped"]
    assert "Ended early: the server does not answer any more." in said
    assert "connection lost" in said


def test_429_is_counted_or_tried_again(
    windlass: Windlass, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, sleep, pauses = tmp_path / "r.json", asyncio.sleep, []

    async def noted(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", noted)
    with fake_server(num_good=4, then="busy") as server:
        said = windlass("bench", "serve", "--base-url", server.url, *SMALL, "-o", output)
        row = row_of(output)
        assert (row["completed"], row["failed"], row["num_rejected"]) == (4, 8, 8)
        assert "8 failed: HTTP 429 (Retry-After: 0.05): the queue is full" in said
        assert RETRY_AFTER_S not in pauses
        words = (*SMALL, "--max-retries", 2, "-o", output)
        windlass("bench", "serve", "--base-url", server.url, *words, code=1)
    row = row_of(output)
    assert (row["completed"], row["num_rejected"]) == (0, 36)
    assert pauses.count(RETRY_AFTER_S) == 12 * 2  # every request before each of its retries


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("garbage", "3 failed: a chunk of the stream cannot be read"),
        ("says error", "3 failed: the server said in the stream: out of memory"),
        ("cuts", "3 failed: the stream ended before the answer did"),
        ("plain", "3 failed: the server does not stream"),
    ],
)
def test_answers_that_are_none_have_failed(
    windlass: Windlass, tmp_path: Path, fault: str, said: str
) -> None:
    output = tmp_path / "r.json"
    with fake_server(num_good=9, then=fault) as server:
        printed = windlass("bench", "serve", "--base-url", server.url, *SMALL, "-o", output)
    assert said in printed
    assert (row_of(output)["completed"], row_of(output)["failed"]) == (9, 3)


def test_a_connection_closed_as_it_is_used_again_is_no_fault(
    windlass: Windlass, tmp_path: Path
) -> None:
    output = tmp_path / "r.json"
    with fake_server(num_good=6, then="hangs up") as server:
        windlass("bench", "serve", "--base-url", server.url, *SMALL, "-o", output)
        assert server.faults.num_tried == 13
    assert (row_of(output)["completed"], row_of(output)["failed"]) == (12, 0)


def test_slow_requests_run_into_their_timeout(windlass: Windlass) -> None:
    words = ("--num-prompts", 2, "--input-len", 8, "--output-len", 50, "--request-timeout", 0.2)
    with fake_server(step_s=0.1) as server:
        said = windlass("bench", "serve", "--base-url", server.url, *words, code=1)
    assert "2 failed: not done after 0.2 s" in said


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Whoever starts the tests in the background has them ignore ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_keeps_what_was_measured(windlass: Windlass, tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    with fake_server(step_s=0.05) as server:

        def press() -> None:
            while server.faults.num_tried < 5:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=press)
        thread.start()
        words = (*SMALL, "-o", output, "-o", tmp_path / "r.csv")
        said = windlass("bench", "serve", "--base-url", server.url, *words, code=130)
        thread.join()
    row = row_of(output)
    assert row["stopped"] == "interrupted"
    assert 2 <= row["completed"] < 12
    assert row["completed"] + row["num_left"] == 12
    assert row["request_throughput"] > 0
    assert "Ended early: interrupted" in said
    assert (tmp_path / "r.csv").read_text().count("\n") == 2


def test_what_cannot_work_is_said_before_anything_is_sent(
    windlass: Windlass, tmp_path: Path
) -> None:
    with fake_server() as server:

        def refused(*words: object, url: str = server.url) -> str:
            ready = ("--ready-check-timeout-sec", 0)
            return windlass("bench", "serve", "--base-url", url, *ready, *words, code=2)

        assert "has no model 'gpt'. It has: fake." in refused("--model", "gpt")
        assert "--goodput 'ttft'" in refused("--goodput", "ttft")
        assert "--base-url 'nowhere'" in refused(url="nowhere")
        assert "--dataset-name 'poems' is not known" in refused("--dataset-name", "poems")
        assert "needs --dataset-path" in refused("--dataset-name", "custom")
        assert "--request-rate 'fast'" in refused("--request-rate", "fast")
        assert "both be a sweep" in refused("--request-rate", "1,2", "--max-concurrency", "1,2")
        assert "auto needs targets" in refused("--request-rate", "auto")
        assert "only with --request-rate auto" in refused("--goodput-share", "0.9")
        auto = ("--request-rate", "auto", "--goodput", "ttft:9")
        assert "up to 1, got 2" in refused(*auto, "--goodput-share", "2")
        assert "both be a sweep" in refused(*auto, "--max-concurrency", "1,2")
        assert "--probe-request-rate cannot be -1" in refused("--probe-request-rate", "-1")
        assert "--backend 'tgi'" in refused("--backend", "tgi")
        assert "--percentile-metrics 'x'" in refused("--percentile-metrics", "x")
        assert "ends in .json, .csv, .html" in refused("-o", "result.txt")
        assert "is no JSON" in refused("--extra-body", "{")
        assert "--ramp-up-strategy needs" in refused("--ramp-up-strategy", "linear")
        assert "--skip-bad-lines mean nothing" in refused("--skip-bad-lines")
        assert "--result-dir" in refused("--result-dir", tmp_path)
        ids = tmp_path / "ids.jsonl"
        ids.write_text('{"prompt": [1, 2]}')
        words: tuple[object, ...] = ("--workload", "custom", "--dataset-path", ids)
        assert "token ids cannot go to a chat endpoint" in refused(*words)
        trace = tmp_path / "t.jsonl"
        trace.write_text('{"timestamp": 0, "prompt": "a"}\n{"timestamp": "x", "prompt": "b"}\n')
        words = ("--dataset-name", "timed_trace", "--dataset-path", trace)
        assert "line 2: \"timestamp\" is 'x'" in refused(*words)
        assert server.faults.bodies == []
        words = (*words, "--skip-bad-lines", "--output-len", 2)
        said = windlass("bench", "serve", "--base-url", server.url, *words)
        assert "left out: line 2" in said
        assert len(server.faults.bodies) == 1


def test_nobody_there(windlass: Windlass) -> None:
    words = ("--base-url", "http://127.0.0.1:9", "--ready-check-timeout-sec", 0)
    said = windlass("bench", "serve", *words, code=1)
    assert "no server is ready at http://127.0.0.1:9" in said


def test_requests_hold_what_was_wished_for(windlass: Windlass) -> None:
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
