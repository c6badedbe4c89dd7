"""The port of --prefill-listen, bound before the model is loaded."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from mmap import mmap

from windlass.errors import ConfigError
from windlass.parallel_config import split_address


@dataclass(frozen=True, slots=True)
class PrefillListener:
    """What a prefill server needs for decode servers; prefill_port.py uses it when the engine is ready."""

    socket: socket.socket
    rings: Sequence[mmap]  # where each rank of the engine writes KV blocks
    secret: bytes = field(repr=False)


def listen(address: str) -> socket.socket:
    """Bind HOST:PORT of --prefill-listen."""
    host, port = split_address("--prefill-listen", address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(found[4][:2], family=found[0], backlog=64)
    except OSError as error:
        why = (
            error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        )
        raise ConfigError(
            f"--prefill-listen {address} cannot be bound: {why}. Give an address of this machine, and a "
            "port that no other process has."
        ) from error
