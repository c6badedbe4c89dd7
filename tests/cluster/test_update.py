"""Updates of a fleet on a real Ray: a good version replaces the old one, a bad one is rolled back.

Run with `make test-cluster`, which installs Ray; without it, these tests are skipped.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.running import ENGINE, PREFIX, Running, running
from tests.serve.conftest import wait_until
from tests.serve.tiny_model import write_tiny_model
from windlass.errors import EngineError

pytest.importorskip("ray", reason="make test-cluster installs Ray")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own, of its sockets and threads

SMALLER = {**ENGINE, "max_num_seqs": 4}
CANARY = {"canary": "50%", "min_requests": 16, "max_canary_s": 200}


@pytest.fixture(scope="module")
def fleet(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = {"name": "tiny", "model": str(tiny_model), "options": ENGINE, "cpus": 0.4}
    document = {"ingress": {"cpus": 0.2}, "models": [{**model, "rollout": CANARY}]}
    with running(document, tmp_path_factory.mktemp("update")) as found:
        yield found


def actors(part: str) -> dict[str, Any]:
    """Handles of actors by name."""
    import ray

    found = ray.util.list_named_actors(all_namespaces=True)
    return {each["name"]: ray.get_actor(**each) for each in found if part in each["name"]}


def test_a_good_version_replaces_the_old_one(fleet: Running) -> None:
    """With requests all the time, of which none fails, and in the same ingress."""
    ingress = actors("#ingress#").keys()
    with fleet.load() as statuses:
        fleet.up(options=SMALLER)
    assert set(statuses) == {200}
    model = fleet.status()["models"]["tiny"]
    assert (model["version"], model["next"], model["deployment"]) == (2, None, "tiny@2")
    assert model["reason"] == "version 2 runs: all replicas have the new version"
    assert [each.report.max_num_seqs for each in fleet.snapshots()] == [4]
    assert set(fleet.status()["deployments"]) == {"ingress", "tiny@2"}
    assert actors("#ingress#").keys() == ingress


def test_a_version_that_does_not_start_is_rolled_back(fleet: Running, tmp_path: Path) -> None:
    before = fleet.snapshots()
    with (
        fleet.load() as statuses,
        pytest.raises(
            EngineError, match=r"tiny: version 3 was rolled back: its replicas do not start"
        ),
    ):
        fleet.up(model=str(tmp_path))
    assert set(statuses) == {200}
    assert [each.pid for each in fleet.snapshots()] == [each.pid for each in before]
    found = fleet.status()
    assert found["models"]["tiny"]["version"] == 2
    assert found["status"] == "RUNNING"


def test_a_canary_with_errors_is_rolled_back(fleet: Running, tiny_model: Path) -> None:
    """Its requests are answered by the old version, so that no client sees an error."""
    refuses_all = {**ENGINE, "max_model_len": 16}
    with (
        fleet.load() as statuses,
        pytest.raises(EngineError, match=r"rolled back: \d+ of \d+ requests failed"),
    ):
        fleet.up(options=refuses_all, model=str(tiny_model))
    assert set(statuses) == {200}
    assert fleet.complete(PREFIX)["choices"]


def test_a_canary_of_less_quality_is_rolled_back(fleet: Running, tmp_path: Path) -> None:
    """The answers of the old version are less likely with other weights."""
    other = write_tiny_model(tmp_path / "other", seed=7)
    probes = []
    for number in range(12):
        found = fleet.complete(prompt := f"{number} levers", max_tokens=1, logprobs=20)
        (top,) = found["choices"][0]["logprobs"]["top_logprobs"]
        texts = [
            text for text in sorted(top, key=top.__getitem__) if len(text) == 1 and text.isascii()
        ]
        probes.append({"prompt": prompt, "answer": texts[-1]})
    file = tmp_path / "probes.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in probes))
    with (
        fleet.load() as statuses,
        pytest.raises(EngineError, match="rolled back: the median score is"),
    ):
        fleet.up(model=str(other), options=ENGINE, rollout={**CANARY, "quality": str(file)})
    assert set(statuses) == {200}


def test_an_update_survives_the_death_of_its_parts(fleet: Running, tiny_model: Path) -> None:
    """Of Serve's controller, of the ingress and of the actor that drives the update."""
    import ray
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    # The version that runs: nothing changes but how the next update goes.
    fleet.up(model=str(tiny_model), options=SMALLER, rollout=CANARY)

    def is_canary() -> bool:
        try:
            model = fleet.status()["models"]["tiny"]
        except (RayError, RayServeException):  # the controller is being restarted
            return False
        return model["phase"] == "canary" and model["share"] == 0.5

    update = threading.Thread(target=lambda: fleet.up(version="again"))
    update.start()
    wait_until(is_canary, 120)
    for part in ("SERVE_CONTROLLER_ACTOR", "#ingress#", "update-windlass"):
        (actor,) = actors(part).values()
        ray.kill(actor, no_restart="#ingress#" in part)

    def answers() -> bool:
        try:
            return bool(fleet.complete()["choices"])
        except (AssertionError, httpx.HTTPError):
            return False

    wait_until(answers, 120)
    wait_until(is_canary, 120)
    with fleet.load() as statuses:
        update.join(240)
    assert set(statuses) == {200}
    model = fleet.status()["models"]["tiny"]
    assert (model["version"], model["next"]) == (6, None)  # three were rolled back
