"""The listening socket: binding it to a TCP port or a unix socket path, and its URL."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from windlass.config import ServeConfig
from windlass.core.card import EngineReport
from windlass.errors import ConfigError
from windlass.machine.posix import need_posix

OnReady = Callable[[EngineReport, str], None]  # called with the URL once the server listens


def bind(config: ServeConfig) -> socket.socket:
    """Bind the address of `config`; an address in use is a ConfigError."""
    if config.uds is not None:
        return _bind_path(config.uds, int(config.uds_mode, 8))
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port}: {error.strerror or error}. "
            "Choose another with --port (0: any free one), or stop what uses it."
        ) from error
    return listener


def _bind_path(path: str, mode: int) -> socket.socket:
    """Bind a unix socket; replaces a stale one that no server listens on."""
    need_posix("--uds", "socket.AF_UNIX")
    listener = socket.socket(socket.AF_UNIX)
    try:
        if Path(path).exists() and stat.S_ISSOCK(os.stat(path).st_mode):
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(path) != 0:
                    os.unlink(path)
        listener.bind(path)
        os.chmod(path, mode)  # no client can connect before `listen`
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on --uds {path}: {error.strerror or error}.") from error
    return listener


def url_of(config: ServeConfig, listener: socket.socket) -> str:
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if config.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
