"""Adapters of a fleet on a real Ray: the API loads and unloads them in all replicas of a model.

Run with `make test-cluster`, which installs Ray; without it, these tests are skipped.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cluster.running import ENGINE, Running, running
from tests.serve.conftest import wait_until
from tests.serve.tiny_model import write_tiny_adapter

pytest.importorskip("ray", reason="make test-cluster installs Ray")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own, of its sockets and threads

KEY = "wl-admin-key-of-a-fleet"


@pytest.fixture(scope="module")
def fleet(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("adapters")
    (folder / "loras" / "broken").mkdir(parents=True)
    write_tiny_adapter(folder / "loras" / "sql")
    write_tiny_adapter(folder / "mail")
    common = {"model": str(tiny_model), "cpus": 0.4}
    document = {
        "ingress": {"cpus": 0.2},
        "serve": {"admin_key": [KEY], "lora_root": ["loras"]},
        "models": [
            {"name": "other", "options": ENGINE, "replicas": {"min": 0, "max": 1}, **common},
            {
                "name": "tiny",
                "options": ENGINE,
                "adapters": {"mail": "mail"},
                "replicas": 2,
                **common,
            },
        ],
    }
    with running(document, folder, KEY) as found:
        yield found


def change(fleet: Running, action: str, name: str, query: str = "") -> httpx.Response:
    body = {"lora_name": name}
    if action == "load":
        body["lora_path"] = str(fleet.file.parent / "loras" / name)
    return fleet.http.post(f"/v1/{action}_lora_adapter{query}", json=body)


def adapters(fleet: Running) -> list[set[str]]:
    return [set(each.adapters) for each in fleet.snapshots("tiny")]


def test_an_adapter_is_loaded_and_unloaded_in_all_replicas(fleet: Running) -> None:
    base = fleet.complete()["choices"][0]["text"]
    loaded = change(fleet, "load", "sql", "?model=tiny")
    assert loaded.status_code == 200, loaded.text
    assert adapters(fleet) == [{"mail", "sql"}] * 2
    answer = fleet.complete(model="sql")
    assert answer["model"] == "sql"
    text = answer["choices"][0]["text"]
    assert text != base

    # Replicas that start later, and engines that are restarted, load it, too.
    victim, kept = fleet.snapshots("tiny")
    os.kill(victim.pid, signal.SIGKILL)
    os.kill(kept.engine_pid, signal.SIGKILL)

    from ray.exceptions import RayActorError

    def is_replaced() -> bool:
        try:
            found = {each.replica: each for each in fleet.snapshots("tiny")}
        except RayActorError:
            return False  # Serve still sends calls to the dead one
        return (
            len(found) == 2
            and victim.replica not in found
            and all(
                each.health.ok and set(each.adapters) == {"mail", "sql"} for each in found.values()
            )
        )

    wait_until(is_replaced, 120)
    for _ in range(4):
        assert fleet.complete(model="sql")["choices"][0]["text"] == text

    unloaded = change(fleet, "unload", "sql")
    assert unloaded.status_code == 200, unloaded.text
    assert adapters(fleet) == [{"mail"}] * 2
    gone = fleet.http.post("/v1/completions", json={"model": "sql", "prompt": "Hi"})
    assert gone.status_code == 404
    assert fleet.complete(model="mail")["model"] == "mail"


@pytest.mark.parametrize(
    ("name", "query", "status", "message"),
    [
        ("sql", "", 400, "add ?model=NAME"),
        ("other", "?model=tiny", 409, "has the name 'other'"),
        ("mail", "?model=tiny", 409, "is loaded already"),
        ("broken", "?model=tiny", 400, "It is loaded nowhere"),
        ("../mail", "?model=tiny", 403, "outside of the folders"),
    ],
)
def test_a_refused_adapter_is_in_no_replica(
    fleet: Running, name: str, query: str, status: int, message: str
) -> None:
    refused = change(fleet, "load", name, query)
    assert refused.status_code == status, refused.text
    assert message in refused.json()["error"]["message"]
    assert adapters(fleet) == [{"mail"}] * 2
