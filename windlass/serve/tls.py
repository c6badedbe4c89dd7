"""TLS: the certificate of the server, which may change while it runs."""

from __future__ import annotations

import asyncio
import os
import ssl
from typing import NoReturn

from windlass.config import ServeConfig
from windlass.errors import ConfigError
from windlass.serve.reload import Reloads, run_reload

_NAME = "TLS certificate"
_CHECK_S = 1.0  # between looks at the files, with --enable-ssl-refresh


class Tls:
    """Owns the TLS context of new connections; a connection keeps the one it was opened with."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self.context = _load(config)

    async def reload(self) -> str:
        """Use the files as they are now; raises ConfigError and changes nothing if they are bad."""
        self.context = await asyncio.to_thread(_load, self._config)
        return f"new connections use {self._config.ssl_certfile}"

    async def refresh_forever(self) -> None:
        """Load the files whenever one of them has changed (--enable-ssl-refresh)."""
        last = self._stamps()
        while True:
            await asyncio.sleep(_CHECK_S)
            stamps = self._stamps()
            if stamps != last:
                # Files that were not all replaced yet fail, and change again.
                last = stamps
                await run_reload(_NAME, self.reload)

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        config = self._config
        return [
            _stamp(path)
            for path in (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)
            if path is not None
        ]


def make_tls(config: ServeConfig, reloads: Reloads) -> Tls | None:
    """Load the certificate, also at every SIGHUP; None: the server uses plain HTTP."""
    if config.ssl_certfile is None:
        return None
    tls = Tls(config)
    reloads.add(_NAME, tls.reload)
    return tls


def _stamp(path: str) -> tuple[int, int, int] | None:
    """What changes with the content of a file; None: there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _load(config: ServeConfig) -> ssl.SSLContext:
    """Make a context of the files; a new one each time, since a context forgets no CA."""
    assert config.ssl_certfile is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2

    def refuse_password() -> (
        NoReturn
    ):  # OpenSSL would ask at the terminal, and the server would wait
        raise ConfigError(
            f"--ssl-keyfile {config.ssl_keyfile} is encrypted. Write the key without a passphrase "
            "(openssl pkey -in KEY -out NEW) into a file with mode 0600."
        )

    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, refuse_password)
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        raise ConfigError(
            f"--ssl-certfile {config.ssl_certfile}, --ssl-keyfile {config.ssl_keyfile} or "
            f"--ssl-ca-certs {config.ssl_ca_certs} cannot be used: {error}. All are PEM files."
        ) from error
    return context
