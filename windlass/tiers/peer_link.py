"""Records of a ring over TCP: the server beside the engine that wrote them, and the source of a reader.

Both ends prove that they know the shared secret (HMAC over nonces of both) before a record is sent. All
messages have a fixed size, so no peer decides how much memory another one needs. The network is
trusted beyond that: records are checked against damage, and not encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
import zlib
from threading import Lock

from windlass.core.handover import PeerRecord
from windlass.tiers.peer import FINGERPRINT_BYTES, MAX_KEY_BYTES, ReadResult, RecordRing

_log = logging.getLogger("windlass.tiers")

_PROTOCOL = b"windlass-kv-1\n"
_NONCE_BYTES = 16
_PROOF_BYTES = 32
_GREETING = struct.Struct(f"<{len(_PROTOCOL)}s{_NONCE_BYTES}s")
_JOIN = struct.Struct(f"<{_NONCE_BYTES}s{FINGERPRINT_BYTES}sQ{_PROOF_BYTES}s")
_GET = struct.Struct(f"<QH{MAX_KEY_BYTES}s")
_REPLY = struct.Struct("<BI")  # whether the record follows, and its checksum
_HANDSHAKE_S = 5.0
_MAX_CONNECTIONS = 64
_RETRY_S = 1.0  # an engine that is out of reach is left alone for so long
_MAX_IDLE = 16  # connections that are kept


def _proof(secret: bytes, role: bytes, *, nonces: bytes, fingerprint: bytes) -> bytes:
    text = b"\0".join([_PROTOCOL, role, nonces, fingerprint])
    return hmac.digest(secret, text, hashlib.sha256)


def _receive(link: socket.socket, count: int) -> bytes:
    """So many bytes; raises OSError if the link ends before, or the time is over."""
    data = bytearray(count)
    _receive_into(link, memoryview(data))
    return bytes(data)


def _receive_into(link: socket.socket, out: memoryview) -> None:
    while out:
        count = link.recv_into(out)
        if not count:
            raise ConnectionResetError("the other end has closed the link")
        out = out[count:]


class RecordServer:
    """Sends the records of a ring to engines of other hosts, each connection in a thread."""

    def __init__(
        self,
        ring: RecordRing,
        listener: socket.socket,
        *,
        secret: bytes,
        fingerprint: bytes,
        record_bytes: int,
    ) -> None:
        self._ring = ring
        self._listener = listener
        self._secret = secret
        self._fingerprint = fingerprint
        self._record_bytes = record_bytes
        self._links: set[socket.socket] = set()
        self._lock = Lock()
        self._is_closed = False
        self.num_refused = 0  # strangers, and engines of another model
        threading.Thread(target=self._accept, name="windlass-kv-server", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
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
                link.close()
            else:
                threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        try:
            link.settimeout(_HANDSHAKE_S)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._greet(link):
                self._send_records(link)
        except OSError as error:
            _log.debug("a connection for KV blocks ended: %s", error)
        finally:
            with self._lock:
                self._links.discard(link)
            link.close()

    def _greet(self, link: socket.socket) -> bool:
        own = secrets.token_bytes(_NONCE_BYTES)
        link.sendall(_GREETING.pack(_PROTOCOL, own))
        nonce, fingerprint, record_bytes, proof = _JOIN.unpack(_receive(link, _JOIN.size))
        nonces = own + nonce
        expected = _proof(self._secret, b"reader", nonces=nonces, fingerprint=fingerprint)
        if not hmac.compare_digest(proof, expected):
            problem = "it does not know the secret"
        elif (fingerprint, record_bytes) != (self._fingerprint, self._record_bytes):
            problem = "its model, options or version are others"
        else:
            link.sendall(_proof(self._secret, b"writer", nonces=nonces, fingerprint=fingerprint))
            return True
        self.num_refused += 1
        _log.warning("a reader of KV blocks at %s is refused: %s", link.getpeername()[0], problem)
        return False

    def _send_records(self, link: socket.socket) -> None:
        record = memoryview(bytearray(self._record_bytes))
        while True:
            link.settimeout(None)  # a reader may be idle for long
            request = _receive(link, _GET.size)
            link.settimeout(_HANDSHAKE_S)
            sequence, num_key, key = _GET.unpack(request)
            wanted = PeerRecord(key[:num_key], sequence)
            if self._ring.read(wanted, record, self._fingerprint) == "read":
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


class RemoteSource:
    """Reads the records of an engine on another host. Every thread that reads has its own connection."""

    def __init__(
        self, address: str, *, secret: bytes, fingerprint: bytes, timeout_s: float = 5.0
    ) -> None:
        host, _, port = address.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._secret = secret
        self._fingerprint = fingerprint
        self._timeout_s = timeout_s
        self._lock = Lock()
        self._idle: list[socket.socket] = []
        self._down_until = 0.0

    def read(self, wanted: PeerRecord, out: memoryview) -> ReadResult:
        """Copy a record into `out`. If the result is not "read", `out` is undefined."""
        with self._lock:
            if time.monotonic() < self._down_until:
                return "lost"
            link = self._idle.pop() if self._idle else None
        try:
            if link is None:
                link = self._open(out.nbytes)
            link.sendall(_GET.pack(wanted.sequence, len(wanted.key), wanted.key))
            has_record, checksum = _REPLY.unpack(_receive(link, _REPLY.size))
            if has_record:
                _receive_into(link, out)
        except OSError as error:
            _log.warning("KV blocks of %s:%d could not be read: %s", *self._address, error)
            if link is not None:
                link.close()
            self._is_down()
            return "lost"
        self._keep(link)
        if not has_record:
            return "missing"
        return "read" if zlib.crc32(out, zlib.crc32(wanted.key)) == checksum else "corrupt"

    def _is_down(self) -> None:
        with self._lock:
            self._down_until = time.monotonic() + _RETRY_S
            idle, self._idle = self._idle, []
        for link in idle:  # of the same engine, which may have been restarted
            link.close()

    def _open(self, record_bytes: int) -> socket.socket:
        link = socket.create_connection(self._address, timeout=self._timeout_s)
        try:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            protocol, nonce = _GREETING.unpack(_receive(link, _GREETING.size))
            if protocol != _PROTOCOL:
                raise ConnectionRefusedError(f"its protocol is {protocol!r}, not {_PROTOCOL!r}")
            own, fingerprint = secrets.token_bytes(_NONCE_BYTES), self._fingerprint
            nonces = nonce + own
            proof = _proof(self._secret, b"reader", nonces=nonces, fingerprint=fingerprint)
            link.sendall(_JOIN.pack(own, fingerprint, record_bytes, proof))
            expected = _proof(self._secret, b"writer", nonces=nonces, fingerprint=fingerprint)
            if not hmac.compare_digest(_receive(link, _PROOF_BYTES), expected):
                raise ConnectionRefusedError("it does not know the secret")
        except BaseException:
            link.close()
            raise
        return link

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
