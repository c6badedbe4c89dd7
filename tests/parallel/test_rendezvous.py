"""How machines find, prove and compare themselves, with real sockets on the loopback address."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from windlass.config import ParallelConfig
from windlass.errors import ConfigError, EngineError
from windlass.handshake import Hello, Identity, Welcome, receive_frame, send_frame
from windlass.parallel import rendezvous
from windlass.parallel.rendezvous import (
    Join,
    MasterGone,
    Nodes,
    Start,
    identify,
    join_master,
    listen,
)

FACTS = {"the Windlass version": "1.0", "--max-num-seqs": "8"}
SECRET = "0123456789abcdef"


def config(**options: Any) -> ParallelConfig:
    options = {"nnodes": 2, "tensor_parallel_size": 2, "node_timeout": 30.0, **options}
    return ParallelConfig(**options)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Engine:
    """The engine of node 0, as far as it takes nodes."""

    def __init__(self, **options: Any) -> None:
        self.parallel = config(master_port=free_port(), **options)
        self.master = listen(self.parallel, FACTS)
        self.nodes = Nodes(self.master, self.parallel)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        while not self._ended.is_set():
            if select.select([self.nodes.listener], [], [], 0.05)[0]:
                self.nodes.accept()

    def join(self, rank: int = 1, again: bool = False, **facts: str) -> socket.socket:
        own = config(master_port=self.parallel.master_port, node_rank=rank)
        changed = {name.replace("_", " "): value for name, value in facts.items()}
        return join_master(own, Identity({**FACTS, **changed}, b""), again=again)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        self.nodes.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.end()
    made.master.listener.close()


def test_a_node_joins_and_waits_for_the_start(engine: Engine) -> None:
    with engine.join() as link:
        (node,) = engine.nodes.wait(lambda: None)
        assert (node.node_rank, node.name) == (1, "node 1 (127.0.0.1)")
        send_frame(node.link, Start(1234))
        assert receive_frame(link, Start) == Start(1234)


def test_what_differs_is_refused_by_name_with_both_values(engine: Engine) -> None:
    message = "the Windlass version is 2.0 on node 1, and 1.0 on node 0"
    with pytest.raises(ConfigError, match=f"node 0 refuses node 1: {message}"):
        engine.join(the_Windlass_version="2.0")
    own = config(master_port=engine.parallel.master_port, node_rank=1)
    without = {"the Windlass version": "1.0"}
    with pytest.raises(ConfigError, match="--max-num-seqs is unknown on node 1, and 8 on node 0"):
        join_master(own, Identity(without, b""), again=False)


def test_a_wrong_secret_is_refused_before_anything_is_compared(engine: Engine) -> None:
    own = config(master_port=engine.parallel.master_port, node_rank=1)
    with pytest.raises(ConfigError, match="its cluster secret is not that of node 0"):
        join_master(own, Identity({}, b"another secret"), again=False)


def test_two_nodes_with_one_rank(engine: Engine) -> None:
    with engine.join():
        engine.nodes.wait(lambda: None)
        with pytest.raises(
            ConfigError, match=r"--node-rank 1 is taken by the machine at 127\.0\.0.1"
        ):
            engine.join()


def test_a_node_that_left_frees_its_rank(engine: Engine) -> None:
    engine.join().close()
    with engine.join():
        assert len(engine.nodes.wait(lambda: None)) == 1


def test_a_node_of_an_engine_that_ends_is_for_the_next_one(engine: Engine) -> None:
    engine.join().close()
    engine.nodes.ended = True
    joined: list[socket.socket] = []
    waiting = threading.Thread(target=lambda: joined.append(engine.join(again=True)))
    waiting.start()
    following = Nodes(engine.master, engine.parallel)
    engine.nodes = following
    assert len(following.wait(lambda: None)) == 1
    waiting.join()
    joined[0].close()


def test_a_server_that_has_ended(engine: Engine) -> None:
    engine.end()
    engine.master.listener.close()
    with pytest.raises(
        MasterGone, match=r"the server of node 0 at 127\.0\.0\.1 port \d+ has ended"
    ):
        engine.join(again=True)


def test_strangers_do_not_disturb(engine: Engine) -> None:
    address = ("127.0.0.1", engine.parallel.master_port)
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, b"\x02\0\0\0\xc1\xc1", b""):
        with socket.create_connection(address) as stranger:
            stranger.sendall(noise)
            with contextlib.suppress(OSError):  # node 0 may have closed it already
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):  # until node 0 closes it
                    pass
    with engine.join():
        assert len(engine.nodes.wait(lambda: None)) == 1


def test_another_service_at_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as service:

        def answer() -> None:
            link, _ = service.accept()
            with link, contextlib.suppress(OSError):
                link.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                link.recv(100)

        threading.Thread(target=answer).start()
        own = config(master_port=service.getsockname()[1], node_rank=1)
        with pytest.raises(ConfigError, match="is no node 0 of this version"):
            join_master(own, Identity({}, b""), again=False)


def test_a_false_node_0_is_not_obeyed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as service:

        def welcome() -> None:
            link, _ = service.accept()
            with link:
                send_frame(link, Hello(rendezvous._PROTOCOL, b"nonce"))
                receive_frame(link, Join)
                send_frame(link, Welcome(bytes(32)))
                link.recv(1)

        threading.Thread(target=welcome).start()
        own = config(master_port=service.getsockname()[1], node_rank=1)
        with pytest.raises(ConfigError, match="does not know the cluster secret of node 1"):
            join_master(own, Identity({}, b""), again=False)


def test_time_limits(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(rendezvous, "_PROGRESS_S", 0.0)
    caplog.set_level("INFO")
    own = config(master_port=free_port(), node_rank=1, node_timeout=0.3)
    with pytest.raises(
        EngineError, match=r"did not answer within --node-timeout 0\.3 s: connection"
    ):
        join_master(own, Identity({}, b""), again=False)
    assert f"waiting for node 0 at 127.0.0.1 port {own.master_port}" in caplog.text
    master = listen(config(master_port=own.master_port), FACTS)
    with pytest.raises(EngineError, match=r"did not answer .*: its engine is not ready"):
        join_master(own, Identity({}, b""), again=False)
    parallel = config(master_port=own.master_port, node_timeout=0.3)
    with pytest.raises(EngineError, match=r"node 1 did not join within .* --node-rank 1, with the"):
        Nodes(master, parallel).wait(lambda: None)
    assert "waiting for other nodes for 0 s: node 1 did not join yet" in caplog.text
    master.listener.close()


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--master-port {port}: .*sport = :{port}"):
            listen(config(master_port=port), FACTS)
    with pytest.raises(ConfigError, match=r"203\.0\.113\.7 .*an address of this machine"):
        listen(config(master_addr="203.0.113.7", cluster_secret=SECRET), FACTS)
    with pytest.raises(ConfigError, match=r"no-such-host\.invalid .*an address of this machine"):
        listen(config(master_addr="no-such-host.invalid", cluster_secret=SECRET), FACTS)
    with pytest.raises(ConfigError, match="names all addresses"):
        listen(config(master_addr="0.0.0.0", cluster_secret=SECRET), FACTS)


def test_the_network_needs_a_secret(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"10\.0\.0.1 can be reached from other machines"):
        listen(config(master_addr="10.0.0.1"), FACTS)
    with pytest.raises(ConfigError, match="head-node can be reached from other machines"):
        identify(config(master_addr="head-node", node_rank=1), FACTS)
    with pytest.raises(ConfigError, match="has 5 characters, and at least 16 are needed"):
        identify(config(cluster_secret="short"), FACTS)
    missing = tmp_path / "missing"
    with pytest.raises(ConfigError, match=r"--cluster-secret-file .*missing cannot be read"):
        identify(config(cluster_secret_file=str(missing)), FACTS)
    missing.write_text(SECRET + "\n")
    assert identify(config(cluster_secret_file=str(missing)), FACTS).secret == SECRET.encode()
    with pytest.raises(ConfigError, match="are both given"):
        config(cluster_secret=SECRET, cluster_secret_file=str(missing))


def test_bad_options() -> None:
    with pytest.raises(ConfigError, match="--node-rank 2 must be below --nnodes 2"):
        config(node_rank=2)
    with pytest.raises(ConfigError, match="--nnodes 2 does not divide the 3 ranks"):
        config(tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="gives each machine 3 ranks, which cuts some groups"):
        config(tensor_parallel_size=2, pipeline_parallel_size=3)
    with pytest.raises(ConfigError, match="--master-port must be at most 65535"):
        config(master_port=70000)
    with pytest.raises(ConfigError, match="--cluster-secret-file does nothing without --nnodes"):
        ParallelConfig(cluster_secret_file="a")
    assert config(tensor_parallel_size=4, node_rank=1).node_ranks == range(2, 4)
