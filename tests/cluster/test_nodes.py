"""A fleet on two nodes of Ray, of which one dies, and whose head dies in the end.

Run with `make test-cluster`, which installs Ray; without it, these tests are skipped.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.running import ENGINE, PREFIX, Running, running_on
from tests.serve.conftest import wait_until

pytest.importorskip("ray", reason="make test-cluster installs Ray")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own, of its sockets and threads


class Nodes:
    """A head with a CPU for the ingress and one replica, and then a node for another one."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        options = {"num_cpus": 1, "object_store_memory": 80_000_000}
        self._options = options
        self.cluster = Cluster(
            initialize_head=True, head_node_args={**options, "include_dashboard": False}
        )

    def lose(self) -> None:
        self.cluster.remove_node(self.node, allow_graceful=False)

    def add(self) -> None:
        self.node = self.cluster.add_node(**self._options)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    try:
        yield made
    finally:
        made.cluster.shutdown()


@pytest.fixture(scope="module")
def fleet(
    nodes: Nodes, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    model = {"name": "tiny", "model": str(tiny_model), "options": ENGINE, "cpus": 0.6}
    document = {"ingress": {"cpus": 0.2}, "models": [model]}
    folder = tmp_path_factory.mktemp("nodes")
    with running_on({"address": nodes.cluster.address}, document, folder) as found:
        nodes.add()
        found.up(replicas=2)
        yield found


def stream(fleet: Running, events: list[str]) -> None:
    """A stream that lasts longer than the test, unless its replica or its proxy dies."""
    body = {"model": "tiny", "prompt": PREFIX, "max_tokens": 20000, "stream": True}
    with (
        suppress(httpx.TransportError),
        fleet.http.stream("POST", "/v1/completions", json={**body, "ignore_eos": True}) as found,
    ):
        for line in found.iter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))


def whole(fleet: Running, found: list[dict[str, Any]]) -> None:
    """A response at once. Each node has a proxy: a client of a dead one connects again."""
    while True:
        with suppress(httpx.TransportError):
            found.append(fleet.complete(PREFIX, max_tokens=3000, ignore_eos=True))
            return


def test_a_node_dies(fleet: Running, nodes: Nodes) -> None:
    """Its streams end with an error event; what has sent nothing runs elsewhere; replicas come back."""
    on_head = {
        each.pid for each in fleet.snapshots() if each.node == nodes.cluster.head_node.node_id
    }
    lost = [each for each in fleet.snapshots() if each.node == nodes.node.node_id]
    assert (len(on_head), len(lost)) == (1, 1)
    events: list[list[str]] = [[], []]
    wholes: list[dict[str, Any]] = []
    threads = [threading.Thread(target=stream, args=(fleet, each), daemon=True) for each in events]
    threads += [threading.Thread(target=whole, args=(fleet, wholes)) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(events))
    wait_until(lambda: any(x.stats.num_running for x in fleet.snapshots() if x.pid == lost[0].pid))
    nodes.lose()
    for thread in threads[2:]:
        thread.join(120)
    assert len(wholes) == 4
    for each in (each for each in events if '"error"' in each[-1]):
        assert "is gone" in json.loads(each[-1])["error"]["message"]
    wait_until(lambda: len(fleet.snapshots()) == 1, 120)
    nodes.add()
    wait_until(lambda: len(fleet.snapshots()) == 2, 120)
    assert {each.node for each in fleet.snapshots()} == {
        nodes.cluster.head_node.node_id,
        nodes.node.node_id,
    }


def test_requests_go_on_without_the_global_control_service(fleet: Running, nodes: Nodes) -> None:
    """Ray ends the nodes only after a minute without it, if nothing has started it again."""
    expected = fleet.complete(PREFIX)["choices"][0]["text"]
    nodes.cluster.head_node.kill_gcs_server()
    for _ in range(5):
        assert fleet.complete(PREFIX)["choices"][0]["text"] == expected
