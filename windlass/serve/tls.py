"""TLS: the certificate of the server."""

from __future__ import annotations

import ssl

from windlass.config import ServeConfig
from windlass.errors import ConfigError


def tls_context(config: ServeConfig) -> ssl.SSLContext | None:
    """Create the TLS context; None: the server uses plain HTTP."""
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        raise ConfigError(
            f"--ssl-certfile {config.ssl_certfile}, --ssl-keyfile {config.ssl_keyfile} or "
            f"--ssl-ca-certs {config.ssl_ca_certs} cannot be used: {error}. All are PEM files."
        ) from error
    return context
