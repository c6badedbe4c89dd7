"""The port of a prefill server: records of its ring over TCP, and links for requests.

Both ends prove that they know the cluster's secret and compare what the KV of a block depends on
(handshake.py) before anything else is sent. A link for records has messages of a fixed size, so no peer
decides how much memory another one needs. A link for requests is given to `on_requests`
(serve/prefill_port.py). The network is trusted beyond that: records are checked against damage, and not
encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Literal

import msgspec

from windlass.core.handover import PeerRecord
from windlass.errors import ConfigError
from windlass.handshake import (
    HANDSHAKE_S,
    Hello,
    Identity,
    Refused,
    Welcome,
    difference,
    receive_frame,
    send_frame,
)
from windlass.sockets import keep_alive
from windlass.tiers.fingerprint import digest_of
from windlass.tiers.peer import MAX_KEY_BYTES, ReadResult, RecordRing

_log = logging.getLogger("windlass.tiers")

LinkKind = Literal["records", "requests"]

_PROTOCOL = "windlass-kv-1"
_GET = struct.Struct(f"<QH{MAX_KEY_BYTES}s")
_REPLY = struct.Struct("<BI")  # whether the record follows, and its checksum
_STALLED_S = 5.0
_MAX_CONNECTIONS = 64
_RETRY_S = 1.0  # an engine that is out of reach is left alone for so long
_MAX_IDLE = 16  # connections that are kept


class Join(msgspec.Struct, tag="join", frozen=True):
    """A decode server, or its engine, to the port. `facts` must be those of the prefill server.

    `rank`: of the engine, which reads the records of the same rank.
    """

    kind: LinkKind
    facts: dict[str, str]
    nonce: bytes
    proof: bytes
    rank: int = 0


class LinkRefused(ConfigError):
    """The other end has another secret, model, version or set of options."""


# ---- the prefill server ------------------------------------------------------------------------


class PeerPort:
    """Sends the records of an engine's rings, one of each rank, to other hosts, each connection in a thread.

    `identity` returns that of the engine which writes the rings now. `on_requests` gets the socket of each link
    for requests, in a thread of this port, and owns it from then on.
    """

    def __init__(
        self,
        rings: Sequence[RecordRing],
        listener: socket.socket,
        *,
        identity: Callable[[], Identity],
        on_requests: Callable[[socket.socket, str], None],
    ) -> None:
        self._rings = rings
        self._listener = listener
        self._identity = identity
        self._on_requests = on_requests
        self._links: set[socket.socket] = set()
        self._lock = Lock()
        self._is_closed = False
        threading.Thread(target=self._accept, name="windlass-kv-port", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def _accept(self) -> None:
        while True:
            try:
                link, (address, *_) = self._listener.accept()
            except OSError as error:
                if self._is_closed:
                    return
                _log.error("a connection for KV blocks could not be accepted: %s", error)
                time.sleep(_RETRY_S)  # no file descriptors are left, perhaps
                continue
            with self._lock:
                is_full = len(self._links) >= _MAX_CONNECTIONS
                if not is_full:
                    self._links.add(link)
            if is_full:
                _log.warning("a connection for KV blocks is refused: %d are open", _MAX_CONNECTIONS)
                link.close()
            else:
                threading.Thread(target=self._serve, args=(link, str(address)), daemon=True).start()

    def _serve(self, link: socket.socket, address: str) -> None:
        join: Join | None = None
        try:
            link.settimeout(HANDSHAKE_S)
            keep_alive(link)
            join, identity = self._greet(link, address), self._identity()
            if join is not None and join.kind == "records":
                self._send_records(link, self._rings[join.rank], digest_of(identity.facts))
        except (OSError, msgspec.DecodeError) as error:  # a stranger, or it has left
            _log.debug("a connection for KV blocks ended: %s", error)
        finally:
            with self._lock:
                self._links.discard(link)
            if join is not None and join.kind == "requests" and not self._is_closed:
                self._on_requests(link, address)
            else:
                link.close()

    def _greet(self, link: socket.socket, address: str) -> Join | None:
        """What the other end wants; None: it is refused, or has left."""
        hello, own = Hello(_PROTOCOL, secrets.token_bytes(32)), self._identity()
        send_frame(link, hello)
        join = receive_frame(link, Join)
        if join is None:
            return None
        expected = Identity(join.facts, own.secret).proof(join.kind, hello, join.nonce)
        if not hmac.compare_digest(join.proof, expected):
            reason = (
                "its cluster secret is not that of the prefill server. Give both the same "
                "--cluster-secret-file."
            )
        else:
            differs = difference(
                own.facts, join.facts, here="on the prefill server", there="on the decode server"
            )
            if differs is None and 0 <= join.rank < len(self._rings):
                send_frame(link, Welcome(own.proof("prefill", hello, join.nonce)))
                return join
            differs = differs or f"it has a rank {join.rank}, and {len(self._rings)} are here."
            reason = f"{differs} Both need the same model, options and version."
        _log.warning("a decode server at %s is refused: %s", address, reason)
        send_frame(link, Refused(reason))
        return None

    def _send_records(self, link: socket.socket, ring: RecordRing, fingerprint: bytes) -> None:
        record = memoryview(bytearray(ring.record_bytes))
        while True:
            link.settimeout(None)  # a reader may be idle for long
            request = _receive(link, _GET.size)
            link.settimeout(_STALLED_S)
            sequence, num_key, key = _GET.unpack(request)
            wanted = PeerRecord(key[:num_key], sequence)
            if ring.read(wanted, record, fingerprint) == "read":
                link.sendall(_REPLY.pack(1, zlib.crc32(record, zlib.crc32(wanted.key))))
                link.sendall(record)
            else:
                link.sendall(_REPLY.pack(0, 0))

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):  # wakes `accept`
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for link in self._links:
                with contextlib.suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)


# ---- the decode server -------------------------------------------------------------------------


def join_port(
    address: str,
    identity: Identity,
    kind: LinkKind,
    timeout_s: float = HANDSHAKE_S,
    rank: int = 0,
) -> socket.socket:
    """Connect to the port of a prefill server. Raises OSError, or LinkRefused with the reason."""
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as undo:
        link = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
        undo.callback(link.close)
        keep_alive(link)
        try:
            hello = receive_frame(link, Hello)
            if hello is None:
                raise ConnectionResetError("it closed the link, or does not answer")
            if hello.protocol != _PROTOCOL:
                raise msgspec.DecodeError(f"it speaks {hello.protocol[:80]!r}, not {_PROTOCOL!r}")
            nonce = secrets.token_bytes(32)
            proof = identity.proof(kind, hello, nonce)
            send_frame(link, Join(kind, dict(identity.facts), nonce, proof, rank))
            answer: Welcome | Refused | None = receive_frame(link, Welcome | Refused)  # type: ignore[arg-type]
        except msgspec.DecodeError as error:
            raise LinkRefused(
                f"the process at {address} is no prefill server of this version: {error}. Check "
                "--prefill-servers, and use the same version of Windlass on all machines."
            ) from error
        if answer is None:
            raise ConnectionResetError("it closed the link, or does not answer")
        if isinstance(answer, Refused):
            raise LinkRefused(
                f"the prefill server at {address} refuses this server: {answer.printable}"
            )
        expected = identity.proof("prefill", hello, nonce)
        if not hmac.compare_digest(answer.proof, expected):
            raise LinkRefused(
                f"the process at {address} does not know the cluster secret. Give both servers the same "
                "--cluster-secret-file."
            )
        undo.pop_all()
        return link


class RemoteSource:
    """Reads the records of an engine on another host. Every thread that reads has its own connection."""

    def __init__(
        self, address: str, identity: Identity, stalled_s: float = _STALLED_S, *, rank: int = 0
    ) -> None:
        """`stalled_s`: seconds for one record, until the engine counts as out of reach."""
        self._rank = rank
        self._address = address
        self._identity = identity
        self._stalled_s = stalled_s
        self._lock = Lock()
        self._idle: list[socket.socket] = []
        self._down_until = 0.0

    def read(self, wanted: PeerRecord, out: memoryview, limit_s: float) -> ReadResult:
        """Copy a record into `out`. If the result is not "read", `out` is undefined."""
        began = time.monotonic()
        with self._lock:
            if began < self._down_until:
                return "lost"
            link = self._idle.pop() if self._idle else None
        until = began + min(limit_s, self._stalled_s)
        found: tuple[bool, int] | None = None
        try:
            if link is not None:
                try:
                    found = _ask(link, wanted, out, until)
                except ConnectionError:  # of a server that has ended, and perhaps started again
                    self._drop(link)
            if found is None:
                timeout_s = min(HANDSHAKE_S, self._stalled_s)
                link = join_port(self._address, self._identity, "records", timeout_s, self._rank)
                found = _ask(link, wanted, out, until)
        except (OSError, LinkRefused) as error:
            self._drop(link)
            if isinstance(error, TimeoutError) and limit_s < self._stalled_s:
                return "missing"  # the prompt took too long, and this record perhaps not
            _log.warning("KV blocks of %s could not be read: %s", self._address, error)
            with self._lock:
                self._down_until = time.monotonic() + _RETRY_S
            return "lost"
        assert link is not None
        self._keep(link)
        has_record, checksum = found
        if not has_record:
            return "missing"
        return "read" if zlib.crc32(out, zlib.crc32(wanted.key)) == checksum else "corrupt"

    def _drop(self, link: socket.socket | None) -> None:
        """Close a link that failed, and with it those that wait."""
        if link is not None:
            link.close()
        self.close()

    def _keep(self, link: socket.socket) -> None:
        with self._lock:
            if len(self._idle) < _MAX_IDLE:
                self._idle.append(link)
                return
        link.close()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()


def _ask(
    link: socket.socket, wanted: PeerRecord, out: memoryview, until: float
) -> tuple[bool, int]:
    """Copy a record into `out`; returns whether there is one, and its checksum."""
    link.settimeout(_left(until))
    link.sendall(_GET.pack(wanted.sequence, len(wanted.key), wanted.key))
    has_record, checksum = _REPLY.unpack(_receive(link, _REPLY.size, until))
    if has_record:
        _receive_into(link, out, until)
    return bool(has_record), checksum


def _left(until: float) -> float:
    """Seconds until then; raises TimeoutError if there are none."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("it took too long")
    return left


def _receive(link: socket.socket, count: int, until: float | None = None) -> bytes:
    """So many bytes; raises OSError if the link ends before, or the time is over."""
    data = bytearray(count)
    _receive_into(link, memoryview(data), until)
    return bytes(data)


def _receive_into(link: socket.socket, out: memoryview, until: float | None = None) -> None:
    while out:
        if until is not None:
            link.settimeout(_left(until))
        count = link.recv_into(out)
        if not count:
            raise ConnectionResetError("the other end has closed the link")
        out = out[count:]
