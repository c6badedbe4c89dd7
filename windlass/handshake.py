"""How two machines trust each other before they work together.

    listener    Hello: its protocol and a nonce
    joiner      a message with its facts, a nonce and a proof
    listener    Welcome with its own proof, or Refused with a reason

A proof is an HMAC over both nonces and the facts with the cluster's secret, so neither takes commands or
data from a stranger. Facts are what must be alike on both sides: versions, model, options. Messages are
msgpack: nothing from the network is unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from windlass.errors import ConfigError
from windlass.parallel_config import ParallelConfig
from windlass.sockets import receive_exactly

HANDSHAKE_S = 5.0
_MAX_FRAME_BYTES = 2**18  # before the other machine is trusted
_MIN_SECRET = 16
_LENGTH = struct.Struct("<I")


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """The listener to a machine that has connected."""

    protocol: str
    nonce: bytes


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The listener does not take the machine. `taken`: since another one has its place."""

    reason: str
    taken: bool = False

    @property
    def printable(self) -> str:
        """The reason, for a message: it may come from a stranger."""
        return "".join(char for char in self.reason if char.isprintable())


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """The listener takes the machine, and proves that it knows the secret."""

    proof: bytes


T = TypeVar("T", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Identity:
    """What this machine shows to the others, and the secret that they share."""

    facts: Mapping[str, str]  # by names for messages: "--max-num-seqs", "the Windlass version"
    secret: bytes = field(repr=False)

    def proof(self, role: str, hello: Hello, nonce: bytes) -> bytes:
        """`nonce`: of the joiner."""
        facts = msgspec.msgpack.encode(sorted(self.facts.items()))
        text = b"\0".join([hello.protocol.encode(), role.encode(), hello.nonce, nonce, facts])
        return hmac.digest(self.secret, text, hashlib.sha256)


def difference(
    own: Mapping[str, str], other: Mapping[str, str], *, here: str, there: str
) -> str | None:
    """The first fact that is not alike, with both values; None: all are. `here`: such as "on node 0"."""
    for name in {**own, **other}:
        ours, theirs = own.get(name, "unknown"), other.get(name, "unknown")
        if ours != theirs:
            return f"{name} is {theirs} {there}, and {ours} {here}."
    return None


def read_secret(parallel: ParallelConfig, option: str, *hosts: str) -> bytes:
    """The cluster's secret; raises if the network could reach one of `hosts` without one.

    `option`: the one that has the hosts, for messages.
    """
    secret = parallel.cluster_secret
    source = "--cluster-secret"
    if parallel.cluster_secret_file is not None:
        source = f"--cluster-secret-file {parallel.cluster_secret_file}"
        try:
            secret = Path(parallel.cluster_secret_file).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{source} cannot be read: {error}.") from error
    if secret is not None and len(secret) < _MIN_SECRET:
        raise ConfigError(
            f"{source} has {len(secret)} characters, and at least {_MIN_SECRET} are needed. Make one "
            "with: openssl rand -hex 32"
        )
    for host in hosts:
        if secret is None and not _is_loopback(host):
            raise ConfigError(
                f"{option} {host} can be reached from other machines, and only a shared secret keeps "
                "strangers out. Make one with `openssl rand -hex 32 > cluster.secret`, copy the file to "
                "all machines, and add --cluster-secret-file cluster.secret (or set "
                "$WINDLASS_CLUSTER_SECRET)."
            )
    return (secret or "").encode()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may stand for another address later
        return host == "localhost"


def send_frame(link: socket.socket, message: msgspec.Struct) -> None:
    frame = msgspec.msgpack.encode(message)
    link.sendall(_LENGTH.pack(len(frame)) + frame)


def receive_frame(link: socket.socket, kinds: type[T]) -> T | None:
    """The next message of one of these kinds; None: the link is closed, or no answer came in time."""
    header = receive_exactly(link, _LENGTH.size)
    if header is None:
        return None
    (length,) = _LENGTH.unpack(header)
    if length > _MAX_FRAME_BYTES:
        raise msgspec.DecodeError(f"a message of {length} bytes")
    frame = receive_exactly(link, length)
    return None if frame is None else msgspec.msgpack.decode(frame, type=kinds)
