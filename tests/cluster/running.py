"""A fleet on a Ray of this machine, for the tests."""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

ENGINE = {"device": "cpu", "dtype": "float32", "num_blocks": 4096, "max_num_seqs": 8}
PREFIX = "The windlass lifts heavy loads with a light lever, again and again. " * 6


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Running:
    """The fleet as the tests see it."""

    def __init__(self, url: str, file: Path, key: str = "") -> None:
        self.url, self.file = url, file
        self.http = httpx.Client(
            base_url=url, timeout=60, headers={"Authorization": f"Bearer {key}"} if key else {}
        )

    def complete(self, prompt: str = "Hi", **fields: Any) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
        response = self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def status(self) -> dict[str, Any]:
        from windlass.cluster import deploy

        found: dict[str, Any] = deploy.status()["windlass"]
        return found

    def snapshots(self, model: str = "tiny") -> list[Any]:
        """Of the replicas of the version that answers."""
        from ray import serve
        from ray.serve.exceptions import DeploymentUnavailableError

        deployment = self.status()["models"][model]["deployment"]
        try:
            handle = serve.get_deployment_handle(deployment, "windlass")
            found: list[Any] = handle.broadcast("snapshot").results(timeout_s=20)
        except DeploymentUnavailableError:
            return []
        return found

    def num_replicas(self, model: str) -> int:
        found = self.status()
        deployment = found["models"][model]["deployment"]
        return int(sum(found["deployments"][deployment]["replicas"].values()))

    def up(self, **changes: Any) -> None:
        """Change the first model of the file, and update the fleet to it."""
        from windlass.cluster import deploy
        from windlass.cluster.fleet import read_fleet

        document = yaml.safe_load(self.file.read_text())
        document["models"][0].update(changes)
        self.file.write_text(yaml.safe_dump(document))
        deploy.up(read_fleet(self.file))

    @contextmanager
    def load(self, num_clients: int = 2, **fields: Any) -> Iterator[Counter[int | str]]:
        """Send requests all the time; counts the statuses of their responses."""
        done, found = threading.Event(), Counter[int | str]()
        body = {"model": "tiny", "prompt": PREFIX, "max_tokens": 32, "ignore_eos": True, **fields}

        def send() -> None:
            with httpx.Client(base_url=self.url, timeout=120, headers=self.http.headers) as client:
                while not done.is_set():
                    try:
                        found[client.post("/v1/completions", json=body).status_code] += 1
                    except httpx.HTTPError as error:
                        found[type(error).__name__] += 1

        threads = [threading.Thread(target=send) for _ in range(num_clients)]
        for thread in threads:
            thread.start()
        try:
            yield found
        finally:
            done.set()
            for thread in threads:
                thread.join(120)


@contextmanager
def running(document: dict[str, Any], folder: Path, key: str = "") -> Iterator[Running]:
    """The fleet of a document, on a Ray with two CPUs."""
    options = {
        "num_cpus": 2,
        "object_store_memory": 80_000_000,
        "include_dashboard": False,
        "_temp_dir": str(folder / "ray")[:60],
    }
    with running_on(options, document, folder, key) as found:
        yield found


@contextmanager
def running_on(
    options: dict[str, Any], document: dict[str, Any], folder: Path, key: str = ""
) -> Iterator[Running]:
    """The fleet of a document, on a Ray with some options."""
    import ray
    from ray import serve

    from windlass.cluster import deploy
    from windlass.cluster.fleet import read_fleet

    file = folder / "fleet.yaml"
    file.write_text(yaml.safe_dump({"port": free_port(), **document}))
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    ray.init(log_to_driver=False, **options)
    try:
        yield Running(deploy.up(read_fleet(file)), file, key)
    finally:
        serve.shutdown()
        ray.shutdown()
