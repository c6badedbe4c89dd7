"""The warm pool on a real Ray: idle models sleep, a request wakes them, and room is made for others.

Run with `make test-cluster`, which installs Ray; without it, these tests are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.running import ENGINE, Running, running
from tests.serve.conftest import wait_until

pytest.importorskip("ray", reason="make test-cluster installs Ray")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own, of its sockets and threads


@pytest.fixture(scope="module")
def fleet(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    common = {
        "model": str(tiny_model),
        "options": ENGINE,
        "cpus": 0.4,
        "replicas": {"min": 0, "max": 1},
        "autoscaling": {"zero_delay_s": 1, "down_delay_s": 1},
    }
    document = {
        "ingress": {"cpus": 0.2},
        "warm_pool": {"memory_gb": 8, "idle_s": 1},
        "models": [{"name": "tiny", **common}, {"name": "rare", **common}],
    }
    with running(document, tmp_path_factory.mktemp("pool")) as found:
        yield found


def asleep(fleet: Running, *names: str) -> bool:
    found = [fleet.snapshots(name) for name in names]
    return all(len(each) == 1 and each[0].is_asleep for each in found)


def test_a_request_wakes_a_sleeping_replica(fleet: Running) -> None:
    """It is the process that slept, not a new one, and its answer is the same."""
    expected = fleet.complete()["choices"][0]["text"]
    for _ in range(2):
        wait_until(lambda: asleep(fleet, "tiny", "rare"))
        before: Any = fleet.snapshots()[0]
        assert fleet.complete()["choices"][0]["text"] == expected
        after: Any = fleet.snapshots()[0]
        assert (after.pid, after.engine_pid) == (before.pid, before.engine_pid)
    assert fleet.status()["models"]["rare"]["asleep"] == 1


def test_a_smaller_pool_keeps_the_model_that_is_more_likely_needed(fleet: Running) -> None:
    wait_until(lambda: asleep(fleet, "tiny", "rare"))
    before: Any = fleet.snapshots()[0]
    held = before.asleep_bytes
    document = yaml.safe_load(fleet.file.read_text())
    document["warm_pool"]["memory_gb"] = 1.5 * held / 2**30
    fleet.file.write_text(yaml.safe_dump(document))
    fleet.up()
    wait_until(lambda: fleet.num_replicas("rare") == 0)
    wait_until(lambda: asleep(fleet, "tiny"))
    after: Any = fleet.snapshots()[0]
    assert after.pid == before.pid
    assert fleet.complete(model="rare")["choices"]  # a cold start
