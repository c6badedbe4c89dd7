"""A fleet on a real Ray of this machine: two replicas of a tiny model, and one that sleeps at zero.

Run with `make test-cluster`, which installs Ray; without it, these tests are skipped.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openai import OpenAI

from tests.cluster.running import ENGINE, PREFIX, Running, running
from tests.serve.conftest import wait_until
from windlass import LLM, SamplingParams

pytest.importorskip("ray", reason="make test-cluster installs Ray")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own, of its sockets and threads

KEY = "wl-test-key-of-a-fleet"


@pytest.fixture(scope="module")
def fleet(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("fleet")
    (folder / "keys.yaml").write_text(
        yaml.safe_dump(
            {"tenants": {"ann": {"keys": [{"sha256": hashlib.sha256(KEY.encode()).hexdigest()}]}}}
        )
    )
    (folder / "keys.yaml").chmod(0o600)
    common = {"model": str(tiny_model), "options": ENGINE, "cpus": 0.4}
    document = {
        "tenants": "keys.yaml",
        "ingress": {"cpus": 0.2},
        "models": [
            {"name": "tiny", "replicas": 2, **common},
            {
                "name": "rare",
                "replicas": {"min": 0, "max": 1},
                "autoscaling": {"zero_delay_s": 3, "down_delay_s": 1},
                **common,
            },
        ],
    }
    with running(document, folder, KEY) as found:
        yield found


def test_answers_are_those_of_the_engine(fleet: Running, tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), **ENGINE)  # type: ignore[arg-type]
    (expected,) = llm.generate([PREFIX], SamplingParams(temperature=0, max_tokens=24))
    whole = fleet.complete(PREFIX, max_tokens=24)
    assert whole["choices"][0]["text"] == expected.outputs[0].text
    assert whole["model"] == "tiny"
    client = OpenAI(base_url=f"{fleet.url}/v1", api_key=KEY, max_retries=0)
    stream = client.completions.create(
        model="tiny", prompt=PREFIX, max_tokens=24, temperature=0, stream=True
    )
    assert "".join(each.choices[0].text for each in stream) == expected.outputs[0].text
    several = fleet.complete(PREFIX, max_tokens=24, n=3)
    assert {each["text"] for each in several["choices"]} == {expected.outputs[0].text}
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": PREFIX}], max_tokens=24, temperature=0
    )
    assert chat.choices[0].message.content == expected.outputs[0].text


def test_the_api_is_that_of_the_server(fleet: Running) -> None:
    assert httpx.get(f"{fleet.url}/v1/models").status_code == 401  # tenants have keys
    names = [each["id"] for each in fleet.http.get("/v1/models").json()["data"]]
    assert names == ["tiny", "rare"]
    assert fleet.http.get("/v1/models/rare").json()["id"] == "rare"
    bad = fleet.http.post(
        "/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": -1}
    )
    assert bad.status_code == 400
    assert bad.json()["error"]["param"] == "max_tokens"
    unknown = fleet.http.post("/v1/completions", json={"model": "none", "prompt": "a"})
    assert unknown.status_code == 404
    refused = fleet.http.patch("/admin/config", json={"max_num_queued_reqs": 1})
    assert refused.status_code == 400
    assert (
        "under `serve:` and engine options under `options:`" in refused.json()["error"]["message"]
    )
    metrics = fleet.http.get("/metrics").text
    assert metrics.count("# HELP windlass:engine_up ") == 1
    assert 'windlass:engine_up{model_name="tiny",replica="1"} 1.0' in metrics
    assert 'windlass:engine_up{model_name="rare"' in metrics


def test_kuberay_builds_the_same_application(fleet: Running) -> None:
    from windlass.cluster.kuberay import build
    from windlass.errors import ConfigError

    assert build({"fleet": str(fleet.file)})
    with pytest.raises(ConfigError, match="expected fleet: FILE"):
        build({"file": "x"})


def test_a_conversation_stays_where_its_prefix_is(fleet: Running) -> None:
    text = "A conversation that grows. " * 8
    for turn in range(5):
        usage = fleet.complete(text)["usage"]
        if turn:
            assert usage["prompt_tokens_details"]["cached_tokens"] > len(text) - 80
        text += "And another turn of it, of many words. "
    assert all(each.stats.num_running == 0 for each in fleet.snapshots())


def test_a_client_that_goes_away_aborts_its_request(fleet: Running) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 20000, "stream": True, "ignore_eos": True}
    with fleet.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # kept: httpx closes the stream with its iterator
        next(lines)
        wait_until(lambda: sum(each.stats.num_running for each in fleet.snapshots()) == 1)
    wait_until(lambda: not any(each.stats.num_running for each in fleet.snapshots()))


def test_kill_9_of_a_replica(fleet: Running) -> None:
    """A stream gets an error event; what has sent nothing runs again; replicas come back."""
    expected = fleet.complete(PREFIX, max_tokens=2000, ignore_eos=True)["choices"][0]["text"]
    body = {
        **{"model": "tiny", "prompt": PREFIX, "ignore_eos": True, "temperature": 0},
        **{"max_tokens": 20000, "stream": True},
    }
    wholes: list[dict[str, Any]] = []
    with fleet.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        thread = threading.Thread(
            target=lambda: wholes.append(fleet.complete(PREFIX, max_tokens=2000, ignore_eos=True))
        )
        thread.start()
        wait_until(lambda: sum(each.stats.num_running for each in fleet.snapshots()) == 2)
        victims = {each.replica: each for each in fleet.snapshots() if each.stats.num_running}
        for victim in victims.values():
            os.kill(victim.pid, signal.SIGKILL)
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    error = json.loads(events[-1])["error"]
    assert "is gone" in error["message"]
    thread.join(60)
    assert wholes[0]["choices"][0]["text"] == expected
    wait_until(
        lambda: (
            len(found := fleet.snapshots()) == 2
            and victim.replica not in {each.replica for each in found}
        )
    )
    assert fleet.complete()["choices"]


def test_kill_9_of_an_engine(fleet: Running) -> None:
    """The replica restarts its engine; requests without output run on the other one."""
    found = fleet.snapshots()
    for each in found:
        os.kill(each.engine_pid, signal.SIGKILL)
        assert fleet.complete(PREFIX)["choices"]
    wait_until(lambda: all(each.health.ok for each in fleet.snapshots()))
    assert {each.pid for each in fleet.snapshots()} == {each.pid for each in found}


def test_an_ingress_that_dies_loses_nothing_but_its_router(fleet: Running) -> None:
    import ray

    expected = fleet.complete(PREFIX)["choices"][0]["text"]
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if "#ingress#" in actor["name"]:
            ray.kill(ray.get_actor(**actor))

    def answers() -> bool:
        try:
            return fleet.complete(PREFIX)["choices"][0]["text"] == expected
        except (AssertionError, httpx.HTTPError):
            return False

    wait_until(answers)
    usage = fleet.complete(PREFIX)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0


def test_to_zero_and_the_first_request_is_held(fleet: Running) -> None:
    wait_until(lambda: fleet.num_replicas("rare") == 0)
    assert fleet.complete(model="rare")["model"] == "rare"
    assert fleet.num_replicas("rare") == 1
