"""Ranks of two machines as rank 0 sees them: real processes and sockets, handlers without torch."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.parallel.test_rendezvous import FACTS, config, free_port
from windlass.config import EngineConfig
from windlass.errors import ConfigError, EngineError, WorkerDied
from windlass.parallel import node
from windlass.parallel.launch import Ranks
from windlass.parallel.place import Place, StoreFile
from windlass.parallel.rank_process import BuildRank, Handler
from windlass.parallel.rendezvous import Master, identify, listen


def prepare() -> None:
    """Import nothing."""


def build(place: Place, ready: Callable[[], object]) -> Handler:
    ready()
    return partial(handle, place.rank)


def build_on_node_0_only(place: Place, ready: Callable[[], object]) -> Handler:
    if place.rank == 3:
        raise ConfigError("rank 3 has no GPU.")
    return build(place, ready)


def handle(rank: int, message: bytes) -> bytes:
    if message == b"raise" and rank == 2:
        raise ValueError("a value")
    if message == b"die" and rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return b"%d: %d bytes" % (rank, len(message))


class Cluster:
    """Node 0 with the ranks 0 and 1, and node 1 with 2 and 3, whose process is a thread here."""

    def __init__(self, build: BuildRank = build) -> None:
        self._build = build
        self.parallel = config(master_port=free_port(), tensor_parallel_size=4)
        self.master: Master = listen(self.parallel, FACTS)
        self.outcome: list[int | EngineError] = []
        self.node = threading.Thread(target=self._serve)
        self.node.start()

    def _serve(self) -> None:
        own = config(master_port=self.parallel.master_port, tensor_parallel_size=4, node_rank=1)
        work = node.NodeWork(own, prepare, self._build)
        try:
            self.outcome.append(node._serve(work, identify(own, FACTS), "node 1"))
        except EngineError as error:
            self.outcome.append(error)

    def engine(self) -> Ranks:
        ranks = Ranks(self.parallel, prepare, master=self.master)
        ranks.build(build)
        for _ in ("ready", "built"):
            ranks.wait_until_ready()
        return ranks

    def end(self) -> int | EngineError:
        """Close node 0's port, as its server does at its end; returns how node 1 ended."""
        self.master.listener.close()
        self.node.join()
        return self.outcome[0]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.end()


def test_commands_reach_every_rank_in_order(cluster: Cluster) -> None:
    ranks = cluster.engine()
    long = 20 * 2**20  # larger than the ring
    for size in (1, 1000, long, 5):
        assert ranks.ask(bytes(size)) == [b"%d: %d bytes" % (rank, size) for rank in (1, 2, 3)]
    ranks.close()
    again = cluster.engine()
    assert len(again.ask(b"x")) == 3, "node 1 has joined the next engine"
    again.close()
    assert cluster.end() == 0


@pytest.mark.parametrize(
    ("command", "kind", "message"),
    [
        (b"raise", EngineError, "rank 2 on node 1: ValueError: a value"),
        (b"die", WorkerDied, r"rank 3 on node 1 was ended by signal 9\."),
    ],
)
def test_a_lost_rank_of_another_machine(
    cluster: Cluster, command: bytes, kind: type[EngineError], message: str
) -> None:
    ranks = cluster.engine()
    with pytest.raises(kind, match=message):
        ranks.ask(command)
    ranks.close()
    ended = cluster.end()
    assert isinstance(ended, WorkerDied)
    assert "node 1 ends: the server of node 0 at 127.0.0.1 port" in str(ended)
    assert str(ended).endswith(str(ranks.failure))


def test_node_1_says_why_node_0_could_not_start(cluster: Cluster) -> None:
    ranks = cluster.engine()
    ranks.close("the weights do not fit.")
    assert "Before that: the weights do not fit." in str(cluster.end())


def test_an_error_of_the_build_keeps_its_kind() -> None:
    cluster = Cluster(build_on_node_0_only)
    with pytest.raises(ConfigError, match=r"^rank 3 has no GPU\.$"):
        cluster.engine()
    assert "Before that: rank 3 has no GPU." in str(cluster.end())


def test_more_ranks_on_a_machine_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from windlass.runner.device import claim_gpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    own = EngineConfig.of(tensor_parallel_size=4, nnodes=2, device="cuda")
    with pytest.raises(ConfigError, match=r"2 ranks on this machine .* torch sees 1\."):
        claim_gpu(own, Place(0, own.parallel, StoreFile("")))
