"""One model on two machines: two network namespaces with a cable between them, and real servers.

A namespace has its own addresses and its own loopback, as a machine has. The API is reached through a
unix socket, which namespaces share.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.parallel.test_failures import children, wait_until_gone
from tests.parallel.test_tensor_parallel import PROMPTS, folder, make, tokens

pytestmark = pytest.mark.slow

__all__ = ["folder"]

OPTIONS = "--load-format dummy --device cpu --dtype float32 --num-blocks 64 --num-threads 1"
ADDRESSES = ("10.213.7.1", "10.213.7.2")


@dataclass(frozen=True)
class Network:
    """The namespaces of the machines; empty: all are on this one."""

    namespaces: tuple[str, ...] = ()

    @property
    def master_addr(self) -> str:
        return ADDRESSES[0] if self.namespaces else "127.0.0.1"

    def command(self, node: int) -> list[str]:
        return ["ip", "netns", "exec", self.namespaces[node]] if self.namespaces else []


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def namespaces() -> Iterator[Network]:
    """Two namespaces that are connected; raises where they are not permitted."""
    names = tuple(f"wl{os.getpid()}{end}" for end in "ab")
    with contextlib.ExitStack() as undo:
        for name in names:
            _ip("netns", "add", name)
            undo.callback(_ip, "netns", "delete", name)
        first, second = names
        _ip(*f"link add eth0 netns {first} type veth peer name eth0 netns {second}".split())
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "eth0", "up")
        yield Network(names)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the program ip (package iproute2)")
    try:
        context = namespaces()
        made = context.__enter__()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not permitted: {error.stderr.decode().strip()}")
    yield made
    context.__exit__(None, None, None)


@dataclass
class Cluster:
    """Starts nodes, and keeps what they print."""

    network: Network
    model: Path
    scratch: Path
    options: str
    port: int
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, node: int, more: str = "") -> subprocess.Popen[bytes]:
        words = f"serve {self.model} {OPTIONS} {self.options} --nnodes 2 --node-rank {node}".split()
        words += f"--master-addr {self.network.master_addr} --master-port {self.port}".split()
        words += ["--uds", str(self.socket), *more.split()]
        program = [*self.network.command(node), sys.executable, "-m", "windlass.cli", *words]
        secret = {"WINDLASS_CLUSTER_SECRET": "a secret of this test"}
        with self.log(node).open("ab") as log:
            process = subprocess.Popen(
                program,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", **secret},
            )
        self.started.append(process)
        return process

    @property
    def socket(self) -> Path:
        return self.scratch / "socket"

    def log(self, node: int) -> Path:
        return self.scratch / f"node-{node}.log"

    def wait_for(self, node: int, text: str, count: int = 1) -> None:
        while self.log(node).read_text().count(text) < count:  # the test's time limit ends this
            time.sleep(0.05)

    def post(self, **body: Any) -> httpx.Response:
        """Complete the first prompt; waits until the server is there."""
        request = {"prompt": PROMPTS[0], "temperature": 0, "ignore_eos": True, "max_tokens": 12}
        while True:
            with (
                contextlib.suppress(httpx.TransportError),
                httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket))) as client,
            ):
                return client.post(
                    "http://localhost/v1/completions",
                    json={**request, "return_token_ids": True, **body},
                    timeout=100,
                )
            time.sleep(0.1)

    def tokens(self) -> list[int]:
        """The tokens of the first prompt; tries again until the engine is ready."""
        while (found := self.post()).status_code != 200:
            time.sleep(0.3)
        ids: list[int] = found.json()["choices"][0]["token_ids"]
        return ids

    def processes(self) -> list[int]:
        """All processes of all nodes that Windlass has started."""
        level = [process.pid for process in self.started]
        found: list[int] = []
        while level:
            level = [child for pid in level for child in children(pid)]
            found += level
        return found


@contextlib.contextmanager
def cluster(network: Network, model: Path, scratch: Path, options: str) -> Iterator[Cluster]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    made = Cluster(network, model, scratch, options, port)
    try:
        yield made
    except BaseException:
        for log in sorted(scratch.glob("*.log")):
            print(f"{log.name}:\n{log.read_text()[-6000:]}")
        raise
    finally:
        for process in made.started:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def want(folder: Path) -> list[int]:
    return tokens(make(folder, 1))[0]


def test_tensor_parallelism_over_two_machines(
    network: Network, folder: Path, tmp_path: Path, want: list[int]
) -> None:
    with cluster(network, folder, tmp_path, "-tp 2") as nodes:
        server, other = nodes.start(0), nodes.start(1)
        assert nodes.tokens() == want
        wrong = nodes.start(1, "--max-num-seqs 3")
        assert wrong.wait() == 2
        nodes.wait_for(1, "--max-num-seqs is 3 on node 1, and None on node 0.")

        left = nodes.processes()
        other.kill()
        assert f"node 1 ({ADDRESSES[1]}) has closed its connection" in nodes.post().text
        nodes.wait_for(0, "restarting it in")
        other = nodes.start(1)
        assert nodes.tokens() == want, "a new process has taken the place of node 1"

        left += nodes.processes()
        server.terminate()
        assert server.wait() == 0
        assert other.wait() == 0
        nodes.wait_for(1, "node 1 ends: the server of node 0 at")
        for pid in left:
            wait_until_gone(pid)


def test_pipeline_stages_on_two_machines(
    network: Network, folder: Path, tmp_path: Path, want: list[int]
) -> None:
    with cluster(network, folder, tmp_path, "-pp 2") as nodes:
        server, other = nodes.start(0), nodes.start(1)
        assert nodes.tokens() == want
        os.kill(other.pid, signal.SIGSTOP)
        nodes.wait_for(0, f"node 1 ({ADDRESSES[1]}) hangs: no heartbeat for 3.")
        os.kill(other.pid, signal.SIGCONT)
        assert nodes.tokens() == want, "node 1 has joined again"
        left = nodes.processes()
        server.kill()
        assert other.wait() == 1
        nodes.wait_for(1, "has ended. Before that: the connection to node 0 is lost")
        for pid in left:
            wait_until_gone(pid)


def test_a_machine_without_its_master(folder: Path, tmp_path: Path) -> None:
    with cluster(Network(), folder, tmp_path, "-tp 2 --node-timeout 0.5") as nodes:
        assert nodes.start(1).wait() == 1
        nodes.wait_for(1, "did not answer within --node-timeout 0.5 s: connection refused.")
        assert nodes.start(0).wait() == 1
        nodes.wait_for(0, "node 1 did not join within --node-timeout 0.5 s.")
        with socket.create_server(("127.0.0.1", nodes.port)):
            assert nodes.start(0).wait() == 2
        nodes.wait_for(
            0, f"node 0 cannot listen on --master-addr 127.0.0.1 --master-port {nodes.port}"
        )
