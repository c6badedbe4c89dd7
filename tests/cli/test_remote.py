"""Commands that query a running server, against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Invoke
from tests.serve.conftest import Server, running
from tests.serve.fakes import Options, counting


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file: Path = tmp_path_factory.mktemp("nap") / "asleep"
    build = counting(Options(sleep_file=str(file), step_s=0.001))
    with running(build, api_key=("one",), price_per_hour=3.0) as made:
        made.http.headers["Authorization"] = "Bearer one"
        yield made


def test_explain_prints_a_sentence_and_the_timeline(windlass: Invoke, served: Server) -> None:
    answer_id = served.complete(prompt="DRAFT what comes", max_tokens=9).json()["id"]
    shown = windlass("explain", answer_id, "--url", served.url, "--key", "one").out
    first = shown.splitlines()[0]
    assert " of " in first
    assert first.endswith(".")
    for word in ("queued", "prompt", "decode", "drafts", "by position", "total", "$"):
        assert word in shown, word
    explanation = json.loads(
        windlass("explain", answer_id, "--url", served.url, "--key", "one", "--json").out
    )
    assert explanation["sentence"] == first


def test_memory_prints_every_owner(windlass: Invoke, served: Server) -> None:
    shown = windlass("memory", "--url", served.url + "/v1", "--key", "one").out
    for word in ("weights", "unaccounted", "KV used", "KV cached", "KV free", "KV unfilled"):
        assert word in shown, word


def test_memory_of_replicas(windlass: Invoke) -> None:
    with running(num_replicas=2) as server:
        shown = windlass("memory", "--url", server.url).out
    assert shown.count("KV used") == 2
    assert "Replica 0" in shown
    assert "Replica 1" in shown


@pytest.mark.parametrize(
    ("args", "message", "code"),
    [
        (["--key", "one", "explain", "nothing"], "no request 'nothing' of yours is known", 2),
        (["explain", "nothing"], "--api-key or $WINDLASS_API_KEY", 2),
        (["--url", "http://127.0.0.1:1", "memory"], "Is it running?", 1),
        (["--url", "localhost", "memory"], "expected for example http://127.0.0.1:8000", 2),
    ],
)
def test_errors_state_what_to_do(
    windlass: Invoke, served: Server, args: list[str], message: str, code: int
) -> None:
    split = next(i for i, word in enumerate(args) if word in ("explain", "memory"))
    flags = args[:split] if "--url" in args else [*args[:split], "--url", served.url]
    outcome = windlass(*args[split:], *flags)
    assert message in outcome.err
    assert outcome.code == code
