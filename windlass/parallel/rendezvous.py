"""How the machines of a replica find and trust each other before plans are sent.

Node 0 listens; every other node connects to it, once per start of the engine. Both prove that they
know the cluster's secret, and node 0 compares what must be alike (handshake.py).
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from windlass.config import ParallelConfig
from windlass.errors import ConfigError, EngineError
from windlass.handshake import (
    HANDSHAKE_S,
    Hello,
    Identity,
    Refused,
    Welcome,
    difference,
    read_secret,
    receive_frame,
    send_frame,
)
from windlass.machine.posix import need_posix
from windlass.sockets import SILENT_S, keep_alive, limit_reads

_log = logging.getLogger("windlass.parallel")

_PROGRESS_S = 10.0
_RETRY_S = 0.25
_MAX_HANDSHAKES = 8
_PROTOCOL = "windlass-nodes-1"
_NOT_READY = "its engine is not ready"


class Join(msgspec.Struct, tag="join", frozen=True):
    """A node to node 0. `facts` must be those of node 0."""

    node_rank: int
    facts: dict[str, str]
    nonce: bytes
    proof: bytes


class Start(msgspec.Struct, tag="start", frozen=True):
    """All nodes are there. `store_port`: of the server where the ranks find each other."""

    store_port: int


def identify(parallel: ParallelConfig, facts: Mapping[str, str]) -> Identity:
    """This machine's identity; raises if the network could reach it without a secret."""
    return Identity(facts, read_secret(parallel, "--master-addr", parallel.master_addr))


class _Wait:
    """A wait of at most `limit_s`, with a line in the log every _PROGRESS_S."""

    def __init__(self, what: str, limit_s: float) -> None:
        self._what = what
        self._limit_s = limit_s
        self._began = self._shown = time.monotonic()

    def goes_on(self, problem: str) -> bool:
        """Whether there is time left."""
        now = time.monotonic()
        if now - self._shown > _PROGRESS_S:
            self._shown = now
            _log.info("waiting for %s for %.0f s: %s", self._what, now - self._began, problem)
        return now - self._began <= self._limit_s


# ---- node 0 ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Master:
    """What the engine of node 0 needs to meet the others; small enough to send to its process."""

    listener: socket.socket
    identity: Identity


def listen(parallel: ParallelConfig, facts: Mapping[str, str]) -> Master:
    """Open node 0's port. It stays open while engines are restarted, so nodes can wait there."""
    identity = identify(parallel, facts)
    host, port = parallel.master_addr, parallel.master_port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if ipaddress.ip_address(found[4][0]).is_unspecified:
            raise ConfigError(
                f"--master-addr {host} names all addresses of this machine. Give the one at which the "
                "other machines reach it."
            )
        listener = socket.create_server(found[4][:2], family=found[0], backlog=64)
    except OSError as error:
        in_use = (
            f"`ss -ltnp sport = :{port}` shows the process that has the port: stop it, or give all "
            "machines another --master-port."
        )
        elsewhere = "Give an address of this machine; only node 0 listens (see --node-rank)."
        raise ConfigError(
            f"node 0 cannot listen on --master-addr {host} --master-port {port}: "
            f"{error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)}. "
            f"{in_use if error.errno == errno.EADDRINUSE else elsewhere}"
        ) from error
    listener.setblocking(False)
    return Master(listener, identity)


@dataclass(frozen=True, slots=True)
class JoinedNode:
    """A machine that has proven the secret, and waits for Start."""

    node_rank: int
    link: socket.socket
    address: str

    @property
    def name(self) -> str:
        return f"node {self.node_rank} ({self.address})"

    def is_there(self) -> bool:
        """Whether the link is open. A node sends nothing before Start."""
        try:
            return bool(self.link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False


class Nodes:
    """Takes the other machines of a replica; owns their links until they are handed out."""

    def __init__(self, master: Master, parallel: ParallelConfig) -> None:
        self.listener = master.listener
        self._identity = master.identity
        self._parallel = parallel
        self._lock = threading.Lock()
        self._joined: dict[int, JoinedNode] = {}
        self._started = False
        self.ended = False  # the engine ends: nodes that connect are for the next one
        self._free = threading.Semaphore(_MAX_HANDSHAKES)

    def accept(self) -> None:
        """Take a connection that waits at the listener; its handshake runs in a thread."""
        try:
            link, (address, *_) = self.listener.accept()
        except OSError:  # it is gone
            return
        if not self._free.acquire(blocking=False):
            link.close()
            return
        threading.Thread(target=self._greet, args=(link, str(address)), daemon=True).start()

    def _greet(self, link: socket.socket, address: str) -> None:
        try:
            keep_alive(link)
            limit_reads(link, HANDSHAKE_S)
            hello = Hello(_PROTOCOL, secrets.token_bytes(32))
            send_frame(link, hello)
            join = receive_frame(link, Join)
            if join is None or self.ended:
                link.close()
                return
            refused = self._take(join, hello, link, address)
            if refused is not None:
                _log.warning(
                    "node %s at %s is refused: %s", join.node_rank, address, refused.reason
                )
                send_frame(link, refused)
                link.close()
        except (OSError, msgspec.DecodeError) as error:  # a stranger, or it has left
            _log.warning("a connection from %s to --master-port failed: %s", address, error)
            link.close()
        finally:
            self._free.release()

    def _take(self, join: Join, hello: Hello, link: socket.socket, address: str) -> Refused | None:
        """Take a node, or return the reason why not."""
        own, rank, nonce = self._identity, join.node_rank, join.nonce
        sent = Identity(join.facts, own.secret).proof(f"node {rank}", hello, nonce)
        if not hmac.compare_digest(sent, join.proof):
            return Refused(
                "its cluster secret is not that of node 0. Give all machines the same "
                "--cluster-secret-file."
            )
        differs = difference(own.facts, join.facts, here="on node 0", there=f"on node {rank}")
        if differs is not None:
            same = (
                "All machines need the same: start them with the same version, files and options."
            )
            return Refused(f"{differs} {same}")
        if not 0 < rank < self._parallel.nnodes:
            return Refused(f"--node-rank {rank} is not between 1 and {self._parallel.nnodes - 1}.")
        with self._lock:
            other = self._joined.get(rank)
            if other is not None and (self._started or other.is_there()):
                reason = (
                    f"--node-rank {rank} is taken by the machine at {other.address}. Give every "
                )
                return Refused(reason + "machine a rank of its own.", taken=True)
            proof = own.proof(f"master of {rank}", hello, nonce)
            send_frame(link, Welcome(proof))
            limit_reads(link, SILENT_S)
            self._joined[rank] = JoinedNode(rank, link, address)
        _log.info("node %d has joined from %s", rank, address)
        return None

    def wait(self, check: Callable[[], None]) -> list[JoinedNode]:
        """Wait until all nodes are there, and return them in order. `check` raises if a rank is lost."""
        parallel = self._parallel
        limit_s = parallel.node_timeout
        command = (
            f"windlass serve MODEL --nnodes {parallel.nnodes} --master-addr {parallel.master_addr} "
            f"--master-port {parallel.master_port} --node-rank"
        )
        wait = _Wait("other nodes", limit_s)
        while True:
            check()
            with self._lock:
                self._joined = {r: node for r, node in self._joined.items() if node.is_there()}
                missing = [r for r in range(1, parallel.nnodes) if r not in self._joined]
                if not missing:
                    self._started = True
                    return [self._joined[rank] for rank in range(1, parallel.nnodes)]
            names = " and ".join(f"node {rank}" for rank in missing)
            start = f"Start there: {command} {missing[0]}, with the same other options."
            if not wait.goes_on(f"{names} did not join yet. {start}"):
                raise EngineError(
                    f"{names} did not join within --node-timeout {limit_s:g} s. {start}"
                )
            time.sleep(_RETRY_S)

    def close(self) -> None:
        for node in self._joined.values():
            node.link.close()


# ---- the other nodes ---------------------------------------------------------------------------


class MasterGone(EngineError):
    """No process listens at node 0's port any more."""


def join_master(parallel: ParallelConfig, identity: Identity, *, again: bool) -> socket.socket:
    """Connect to node 0, and wait until it starts an engine that takes this node.

    Raises after --node-timeout, and at once if node 0 refuses. `again`: node 0 was there before, so a
    closed port means that its server has ended (MasterGone), while an open one is waited at for any
    time: the server may sleep.
    """
    where = f"{parallel.master_addr} port {parallel.master_port}"
    limit_s = parallel.node_timeout
    wait = _Wait(f"node 0 at {where}", limit_s)
    while True:
        problem = _NOT_READY
        try:
            link = _connect(parallel, identity, wait, again=again)
            if isinstance(link, socket.socket):
                _log.info("node %d has joined node 0 at %s", parallel.node_rank, where)
                return link
            if link is not None and not (again and link.taken):
                raise ConfigError(f"node 0 refuses node {parallel.node_rank}: {link.printable}")
        except ConnectionRefusedError as error:
            if again:
                raise MasterGone(f"the server of node 0 at {where} has ended") from error
            problem = "connection refused"
        except OSError as error:
            problem = error.strerror or str(error)
        if not wait.goes_on(problem):
            raise EngineError(
                f"node 0 at {where} did not answer within --node-timeout {limit_s:g} s: {problem}. "
                "Start windlass serve with --node-rank 0 there, and check --master-addr, --master-port "
                "and the firewall."
            )
        time.sleep(_RETRY_S)


def _connect(
    parallel: ParallelConfig, identity: Identity, wait: _Wait, *, again: bool
) -> socket.socket | Refused | None:
    """The link to node 0, or its refusal; None: node 0 did not take the connection, or closed it."""
    need_posix("--nnodes", "select.poll")
    address = (parallel.master_addr, parallel.master_port)
    with contextlib.ExitStack() as undo:
        link = undo.enter_context(socket.create_connection(address, timeout=HANDSHAKE_S))
        link.settimeout(None)
        keep_alive(link)
        # No engine takes the connection while one is being started, or the server sleeps.
        poll = select.poll()
        poll.register(link, select.POLLIN)
        while not poll.poll(1000 * _RETRY_S):
            if not wait.goes_on(_NOT_READY) and not again:
                return None
        limit_reads(link, HANDSHAKE_S)
        try:
            answer = _introduce(link, identity, parallel.node_rank)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"the process at {address[0]} port {address[1]} is no node 0 of this version: {error}. "
                "Check --master-addr and --master-port, and use the same version of Windlass on all "
                "machines."
            ) from error
        if not isinstance(answer, Welcome):
            return answer
        limit_reads(link, 0)
        undo.pop_all()
        return link


def _introduce(link: socket.socket, identity: Identity, rank: int) -> Welcome | Refused | None:
    """Prove the secret to node 0, and check that it knows it, too; None: it has closed the link."""
    hello = receive_frame(link, Hello)
    if hello is None:
        return None
    if hello.protocol != _PROTOCOL:
        raise msgspec.DecodeError(f"it speaks {hello.protocol[:80]!r}, not {_PROTOCOL!r}")
    nonce = secrets.token_bytes(32)
    proof = identity.proof(f"node {rank}", hello, nonce)
    send_frame(link, Join(rank, dict(identity.facts), nonce, proof))
    answer: Welcome | Refused | None = receive_frame(link, Welcome | Refused)  # type: ignore[arg-type]
    if isinstance(answer, Welcome):
        expected = identity.proof(f"master of {rank}", hello, nonce)
        if not hmac.compare_digest(expected, answer.proof):
            raise ConfigError(
                f"the process at --master-addr does not know the cluster secret of node {rank}. Give all "
                "machines the same --cluster-secret-file."
            )
    return answer
