"""Degradation: the models of --fallback answer what the server's own cannot answer in time."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from typer.testing import CliRunner

from tests import warm_start
from tests.serve.conftest import Server, running, wait_until
from tests.serve.fakes import CARD, Options, counting
from tests.serve.tiny_model import write_tiny_model
from windlass.build import open_model
from windlass.cli.main import app
from windlass.config import EngineConfig
from windlass.errors import ConfigError, DeadlineExceeded, Overloaded, RequestError, WorkerDied
from windlass.serve.admission import AdmissionControl
from windlass.serve.client import EngineClient
from windlass.serve.fallback import (
    FallbackStep,
    Forecast,
    check_memory,
    first_step,
    mode_of,
    next_steps,
    parse_step,
    reason_of,
)
from windlass.serve.health import RestartPolicy
from windlass.serve.launch import FallbackParts
from windlass.serve.problems import Draining, RateLimited, Sleeping
from windlass.start import build_replicas

OPTIONS = {"device": "cpu", "dtype": "float32", "num_blocks": 100}
# Long enough to be running until a test has seen the answer to another request.
LONG: dict[str, Any] = {"prompt": "Hi", "max_tokens": 480, "ignore_eos": True, "fallback": "none"}
MESSAGES = [{"role": "user", "content": "Hello"}]
ADMIN = {"Authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models with different weights and chat templates."""
    root = tmp_path_factory.mktemp("models")
    own = write_tiny_model(root / "large", seed=0)
    other = write_tiny_model(root / "small", seed=1)
    settings = json.loads((other / "tokenizer_config.json").read_text())
    settings["chat_template"] = "short: " + settings["chat_template"]
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    return own, other


def part(folder: Path, text: str = "small", **options: Any) -> FallbackParts:
    """A step with the model of `folder`."""
    config = EngineConfig.of(model=str(folder), **OPTIONS, max_num_seqs=4, **options)
    opened = open_model(config)
    (build,) = build_replicas(config, opened.source)
    return FallbackParts(parse_step(text), EngineClient(build), lambda: opened.card)


@contextmanager
def serving(
    folders: tuple[Path, Path], steps: list[FallbackParts], **options: Any
) -> Iterator[Server]:
    """One request runs and one waits; the third is refused."""
    config = EngineConfig.of(model=str(folders[0]), **OPTIONS, max_num_seqs=1)
    opened = open_model(config)
    (build,) = build_replicas(config, opened.source)
    restarts = RestartPolicy(first_pause_s=1.5)
    with running(
        build=build,
        card=opened.card,
        engine=config,
        restarts=restarts,
        fallbacks=steps,
        max_num_queued_reqs=1,
        **options,
    ) as server:
        yield server


@pytest.fixture(scope="module")
def server(folders: tuple[Path, Path]) -> Iterator[Server]:
    with serving(folders, [part(folders[1])], admin_key=("admin",)) as server:
        yield server


@contextmanager
def busy(server: Server) -> Iterator[None]:
    """Fill the slot and the queue of the server's own model."""
    stop = threading.Event()

    def hold() -> None:
        while not stop.is_set():
            with httpx.stream(
                "POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}, timeout=20
            ) as response:
                for _ in response.iter_raw():
                    if stop.is_set():
                        return

    def is_full() -> bool:
        load = server.http.get("/load").json()
        return bool(load["num_requests_running"] + load["num_requests_waiting"] == 2)

    with ThreadPoolExecutor(2) as pool:
        holders = [pool.submit(hold) for _ in range(2)]
        try:
            wait_until(is_full)
            yield
        finally:
            stop.set()
            for holder in holders:
                holder.result()
    wait_until(lambda: server.http.get("/load").json()["server_load"] == 0)


@contextmanager
def waiting(
    monkeypatch: pytest.MonkeyPatch, server: Server, own_s: float, other_s: float
) -> Iterator[None]:
    """Predict these waits for the server's own model and for the others."""

    def predict(control: AdmissionControl, _num_requests: int) -> float:
        return own_s if control._client is server.client else other_s

    with monkeypatch.context() as patch:
        patch.setattr(AdmissionControl, "predicted_wait_s", predict)
        yield


def count(server: Server, reason: str) -> float:
    return server.metric("request_fallbacks_total", reason=reason, fallback_model="small")


def test_without_need_the_own_model_answers(server: Server) -> None:
    response = server.chat(max_tokens=4)
    assert response.json()["model"] == "large"
    assert "X-Windlass-Fallback" not in response.headers


def test_a_full_queue_is_answered_by_the_other_model(server: Server) -> None:
    direct = server.chat(max_tokens=4, temperature=0, messages=MESSAGES).json()
    before = count(server, "queue_full")
    with busy(server):
        found = server.openai.chat.completions.with_raw_response.create(
            model="large", messages=MESSAGES, max_tokens=4, temperature=0
        )
        stream = server.openai.chat.completions.create(
            model="large", messages=MESSAGES, max_tokens=4, temperature=0, stream=True
        )
        chunks = list(stream)
        with pytest.raises(openai.RateLimitError):
            server.openai.chat.completions.create(
                model="large", messages=MESSAGES, extra_body={"fallback": "none"}
            )
    completion = found.parse()
    assert (completion.model, found.headers["x-windlass-fallback"]) == ("small", "queue_full")
    assert {chunk.model for chunk in chunks} == {"small"}
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == completion.choices[0].message.content
    # Its own template has seven more tokens, and its weights other answers.
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == direct["usage"]["prompt_tokens"] + 7
    assert text != direct["choices"][0]["message"]["content"]
    assert count(server, "queue_full") == before + 2
    assert server.metric("generation_tokens_total", model_name="small") >= 8
    explained = server.http.get(f"/v1/requests/{completion.id}/explain").json()
    assert explained["fallback"] == {"reason": "queue_full", "model": "small"}
    assert explained["completions"][0]["output_tokens"] == 4


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 4}),
        ("/api/chat", {"messages": MESSAGES, "stream": False, "options": {"num_predict": 4}}),
        ("/completion", {"prompt": "Hi", "n_predict": 4}),
        ("/v1/completions", {"prompt": "Hi", "n": 2, "max_tokens": 4, "logprobs": 1}),
        ("/v1/completions", {"prompt": "Hi", "n": 2, "max_tokens": 4, "use_beam_search": True}),
    ],
)
def test_every_api_falls_back(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    with waiting(monkeypatch, server, own_s=5.0, other_s=0.0):
        response = server.http.post(path, json={**body, "fallback": "auto"})
        plain = server.http.post(path, json=body)
        header = server.http.post(path, json=body, headers={"X-Windlass-Fallback": "auto"})
    assert response.status_code == 200, response.text
    assert response.json()["model"] == "small"
    assert response.headers["X-Windlass-Fallback"] == "wait"
    assert plain.json()["model"] == "large"  # it may wait
    assert header.json()["model"] == "small"


def test_a_deadline_that_would_pass_in_the_queue(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with waiting(monkeypatch, server, own_s=30.0, other_s=0.0):
        late = server.complete(max_tokens=4, deadline_ms=20_000)
        in_time = server.complete(max_tokens=4, deadline_ms=40_000)
    assert (late.json()["model"], in_time.json()["model"]) == ("small", "large")
    assert late.headers["X-Windlass-Fallback"] == "deadline"
    with waiting(monkeypatch, server, own_s=30.0, other_s=25.0):  # both would be late
        response = server.complete(max_tokens=4, deadline_ms=20_000)
    assert response.json()["model"] == "large"


@pytest.mark.parametrize(
    "body",
    [{"prompt": [72, 105]}, {"prompt": "Hi", "logit_bias": {"5": 1.0}}, {"prompt": "Hi " * 300}],
)
def test_what_the_other_model_cannot_answer_gets_the_first_error(
    server: Server, body: dict[str, Any]
) -> None:
    """Token ids have another meaning there, and a prompt may be too long."""
    with busy(server):
        response = server.http.post("/v1/completions", json={**body, "max_tokens": 2})
    assert response.status_code in (400, 429)
    assert response.status_code == (400 if len(body["prompt"]) > 500 else 429)


def test_bad_modes_are_refused(server: Server) -> None:
    response = server.complete(fallback="always")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "fallback")
    headers = {"X-Windlass-Fallback": "always"}
    response = server.http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "fallback")
    assert server.complete(model="small").status_code == 404


def test_a_restarting_engine_is_replaced_and_the_server_stays_ready(server: Server) -> None:
    process = server.client.replicas[0].supervisor._process
    assert process is not None
    os.kill(process._process.pid or 0, signal.SIGKILL)
    wait_until(lambda: not server.client.health().ok)
    response = server.complete(max_tokens=4)
    health = server.http.get("/health")
    assert (response.json()["model"], response.headers["X-Windlass-Fallback"]) == (
        "small",
        "unavailable",
    )
    assert (health.status_code, health.json()["status"]) == (200, "degraded")
    assert server.metric("engine_up", model_name="small") == 1
    wait_until(lambda: server.client.health().ok)
    assert server.complete(max_tokens=4).json()["model"] == "large"


def test_both_engines_sleep_and_wake(server: Server) -> None:
    assert server.http.post("/admin/sleep?level=1", headers=ADMIN).json()["level"] == 1
    assert server.complete().status_code == 503
    assert server.http.post("/admin/wake", headers=ADMIN).json()["level"] == 0
    with busy(server):
        assert server.complete(max_tokens=4).json()["model"] == "small"


def fake_part(name: str, text: str = "small") -> FallbackParts:
    """A step whose engine counts."""
    return FallbackParts(
        parse_step(text), EngineClient(counting(Options())), lambda: replace(CARD, name=name)
    )


def test_tenants_may_forbid_it_and_a_shorter_answer_lowers_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tenant(name: str, **fields: Any) -> dict[str, Any]:
        return {"keys": [{"sha256": sha256(name.encode()).hexdigest()}], **fields}

    tenants = {
        "strict": tenant("strict", fallback="none"),
        "easy": tenant("easy", fallback="auto"),
        "counter": tenant("counter", fallback="auto", models=["counter"]),
    }
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump({"tenants": tenants}))
    file.chmod(0o600)
    steps = [FallbackParts(parse_step("max_tokens=3")), fake_part("small", "small,max_tokens=5")]
    body = {"prompt": "Hi", "max_tokens": 8, "ignore_eos": True, "fallback": "auto"}

    def ask(server: Server, key: str) -> tuple[str, int]:
        headers = {"Authorization": f"Bearer {key}"}
        answer = server.http.post("/v1/completions", json=body, headers=headers).json()
        return answer["model"], answer["usage"]["completion_tokens"]

    with running(fallbacks=steps, keys_file=str(file)) as server:
        with waiting(monkeypatch, server, own_s=3.0, other_s=0.0):
            assert ask(server, "strict") == ("counter", 8)
            assert ask(server, "easy") == ("counter", 3)
        with waiting(monkeypatch, server, own_s=9.0, other_s=0.0):
            assert ask(server, "strict") == ("counter", 8)
            assert ask(server, "easy") == ("small", 5)
            assert ask(server, "counter") == ("counter", 8)


def test_a_request_that_ends_engines_ends_two_of_the_whole_chain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Strikes count for the content of a request, whichever model runs it."""
    parts = [fake_part("small"), fake_part("smaller", "smaller")]
    clients = [each.client for each in parts]
    with running(fallbacks=parts) as server:

        def num_ends() -> list[int]:
            every = [server.client, *(each for each in clients if each is not None)]
            return [each.replicas[0].num_ends for each in every]

        poison = server.chat(messages=[{"role": "user", "content": "DIE"}])
        assert (poison.status_code, poison.json()["error"]["code"]) == (422, "request_blocked")
        assert num_ends() == [1, 1, 0]
        # Neither while engines restart nor with another way to send the same content.
        again = server.chat(
            messages=[{"role": "user", "content": "DIE"}], user="x", fallback="auto"
        )
        assert again.json()["error"]["code"] == "request_blocked"
        wait_until(lambda: server.client.health().ok)
        with waiting(monkeypatch, server, own_s=9.0, other_s=0.0):
            again = server.chat(messages=[{"role": "user", "content": "DIE"}], fallback="auto")
        assert again.json()["error"]["code"] == "request_blocked"
        assert num_ends() == [1, 1, 0]
        assert server.complete(max_tokens=2).status_code == 200


def test_http_workers_know_the_models_of_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process has all tokenizers and templates; the server's process has all engines."""
    steps = [fake_part("small", "small,max_tokens=5"), FallbackParts(parse_step("max_tokens=3"))]
    body = {"prompt": "Hi", "max_tokens": 8, "ignore_eos": True}
    with running(fallbacks=steps, http_workers=2) as server:

        def ask(**fields: Any) -> tuple[str, int, str | None]:
            with httpx.Client(base_url=server.url, timeout=20) as http:  # another worker each time
                found = http.post("/v1/completions", json={**body, **fields})
            answer = found.json()
            num_tokens = answer["usage"]["completion_tokens"]
            return answer["model"], num_tokens, found.headers.get("X-Windlass-Fallback")

        assert ask() == ask() == ("counter", 8, None)
        with waiting(monkeypatch, server, own_s=9.0, other_s=0.0):
            assert ask() == ("counter", 8, None)
            assert ask(fallback="auto") == ask(fallback="auto") == ("small", 5, "wait")
            assert ask(deadline_ms=5_000) == ("small", 5, "deadline")
            assert ask(fallback="none", deadline_ms=60_000) == ("counter", 8, None)
        with waiting(monkeypatch, server, own_s=3.0, other_s=8.0):
            assert ask(fallback="auto") == ("counter", 3, "wait")
        assert server.metric("request_fallbacks_total", fallback_model="small") == 3
        assert server.metric("request_success_total", model_name="small") == 3
        assert server.metric("generation_tokens_total", model_name="small") == 15
        with waiting(monkeypatch, server, own_s=9.0, other_s=0.0):
            found = server.chat(max_tokens=4, fallback="auto").json()
        explained = server.http.get(f"/v1/requests/{found['id']}/explain").json()
        assert explained["fallback"] == {"reason": "wait", "model": "small"}
        # Errors of an engine reach the worker, which asks the next one.
        poison = server.chat(messages=[{"role": "user", "content": "DIE"}])
        assert (poison.status_code, poison.json()["error"]["code"]) == (422, "request_blocked")
        assert server.metric("requests_in_flight") == 0


def test_the_same_name_twice_is_refused() -> None:
    with pytest.raises(AssertionError) as error, running(fallbacks=[fake_part("counter")]):
        pass
    assert isinstance(error.value.__cause__, ConfigError)
    assert "served_model_name" in str(error.value.__cause__)


# ---- the policy --------------------------------------------------------------------------------

OWN, SHORTER, SMALL = None, FallbackStep(max_tokens=8), FallbackStep(model="small")


@pytest.mark.parametrize(
    ("waits", "allowed", "limit", "expected"),
    [
        ((1.0, 1.0, 0.0), None, None, (0, None)),
        ((1.0, 1.0, 0.0), 2.0, 2.0, (0, None)),
        ((3.0, 3.0, 0.0), 2.0, None, (2, "deadline")),
        ((3.0, 3.0, 2.5), 2.0, None, (0, None)),
        ((3.0, 3.0, 0.0), None, 2.0, (1, "wait")),
        ((5.0, 5.0, 0.0), None, 2.0, (2, "wait")),
        ((5.0, 5.0, 6.0), None, 2.0, (0, None)),
    ],
)
def test_the_first_step(
    waits: tuple[float, ...],
    allowed: float | None,
    limit: float | None,
    expected: tuple[int, str | None],
) -> None:
    steps = [OWN, SHORTER, SMALL]
    forecasts = [Forecast(each) for each in waits]
    assert first_step(steps, forecasts, allowed_s=allowed, limit_s=limit) == expected


def test_an_engine_that_is_down_is_not_tried_first() -> None:
    steps = [OWN, SHORTER, SMALL]
    down, up = Forecast(0.0, is_up=False), Forecast(3.0)
    assert first_step(steps, [down, down, up], allowed_s=None, limit_s=None) == (2, "unavailable")
    assert first_step(steps, [down, down, up], allowed_s=2.0, limit_s=None) == (0, None)
    assert first_step(steps, [down, down, down], allowed_s=None, limit_s=None) == (0, None)
    assert first_step(steps, [up, up, down], allowed_s=1.0, limit_s=None) == (0, None)


def test_the_steps_after_an_error() -> None:
    other = replace(SMALL, model="other")
    assert next_steps([OWN, SHORTER, SMALL, None, other], 0) == [2, 4]
    assert next_steps([OWN, SHORTER, SMALL, None, other], 2) == [4, 0]
    reasons = [
        (DeadlineExceeded("late"), "deadline"),
        (Overloaded("full", 1.0), "queue_full"),
        (RateLimited("limit", 1.0), None),
        (WorkerDied("dead"), "unavailable"),
        (Draining("end"), None),
        (Sleeping("asleep", 1.0), None),
        (RequestError("bad"), None),
    ]
    assert [reason_of(error) for error, _ in reasons] == [reason for _, reason in reasons]


def test_the_mode_of_a_request() -> None:
    assert mode_of(None, None, None, is_batch=False) is None
    assert mode_of("auto", None, None, is_batch=False) == "auto"
    assert mode_of("none", "auto", "auto", is_batch=False) == "none"
    assert mode_of("auto", "none", "auto", is_batch=False) == "none"
    assert mode_of("auto", None, None, is_batch=True) == "none"
    assert mode_of(None, "auto", None, is_batch=True) == "auto"


def test_steps_are_parsed() -> None:
    assert parse_step("max_tokens=64") == FallbackStep(max_tokens=64)
    assert parse_step("org/m, memory_share=0.2,max-tokens=9,dtype=auto") == FallbackStep(
        model="org/m", max_tokens=9, options="memory_share=0.2,dtype=auto"
    )
    for bad in ("", "max_tokens=0", "max_tokens=x", "memory_share=0.2", ",max_tokens=4"):
        with pytest.raises(ConfigError, match="--fallback"):
            parse_step(bad)
    check_memory([("a", 0.7), ("b", 0.3)])
    with pytest.raises(ConfigError, match=r"a 0\.7, b 0\.4"):
        check_memory([("a", 0.7), ("b", 0.4)])


# ---- the command line --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fallback", "SMALL"], "does not say how much memory"),
        (["--fallback", "SMALL,memory_share=0.9"], "sum up to more than 1"),
        (["--fallback", "SMALL,num_block=20"], "num_block"),
        (["--fallback", "max_tokens=none"], "max_tokens is a number"),
        (["--fallback-wait-ms", "0"], "--fallback-wait-ms"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(
    folders: tuple[Path, Path], words: list[str], message: str
) -> None:
    own, other = map(str, folders)
    words = [word.replace("SMALL", other) for word in words]
    result = CliRunner().invoke(app, ["serve", own, "--device", "cpu", *words])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_the_command_starts_both_models(folders: tuple[Path, Path]) -> None:
    own, other = map(str, folders)
    command = [sys.executable, "-m", "windlass.cli", "serve", own, "--port", "0"]
    command += ["--num-blocks", "50", "--fallback", f"{other},num_blocks=40,dtype=float32"]
    with warm_start.start(
        command, stdout=subprocess.PIPE, env={**os.environ, "COLUMNS": "200"}
    ) as process:
        assert process.stdout is not None
        try:
            shown = ""
            while "serves at" not in shown:
                line = process.stdout.readline()
                assert line, shown
                shown += line
            (url,) = re.findall(r"http://\S+", shown)
            metrics = httpx.get(f"{url}/metrics").text
        finally:
            process.terminate()
    assert re.search(r"fallback\s+.\s+small\s+.\s+40 KV blocks.*; \d+ threads: ", shown), shown
    assert 'engine_up{model_name="small"} 1.0' in metrics
    assert 'engine_up{model_name="large"} 1.0' in metrics
