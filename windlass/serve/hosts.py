"""Checks the Host and Origin headers, so that web pages cannot use a server on localhost.

A page can send requests to localhost (CSRF), and a DNS name that points to 127.0.0.1 makes them
same-origin (DNS rebinding). Browsers reveal both in the Origin and Host headers.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from windlass.config import ServeConfig
from windlass.serve.live_config import LiveConfig
from windlass.serve.problems import ForeignOrigin, Problem, problem_of_status

_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
ANY = "*"


def names_of(config: ServeConfig) -> frozenset[str] | None:
    """The server's names; None: they are unknown, or browsers cannot reach the server."""
    if not config.allowed_hosts and (config.uds is not None or not _is_loopback(config.host)):
        return None
    return _LOCAL | {_hostname(host) for host in (config.host, *config.allowed_hosts)}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _hostname(authority: str) -> str:
    """Remove the port of a Host header: localhost, 127.0.0.1, ::1."""
    text = authority.lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    name, _, port = text.rpartition(":")
    host = name if name and ":" not in name and port.isdecimal() else text
    return host.removesuffix(".")


class HostGuard:
    """Middleware that answers 403 to a foreign Host or Origin, while the server's names are known."""

    def __init__(self, app: ASGIApp, config: LiveConfig) -> None:
        self._app = app
        self._config = config
        config.watch(self._apply)

    def _apply(self, config: ServeConfig) -> None:
        self._names = names_of(config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
        else:
            problem.log(scope["path"], Headers(scope=scope).get("x-request-id", ""))
            await problem.response(scope["path"])(scope, receive, send)

    def _refusal(self, headers: Headers) -> Problem | None:
        names = self._names
        if names is None:
            return None
        for host in headers.getlist("host"):  # none: HTTP/1.0, which no browser sends
            if ANY not in names and _hostname(host) not in names:
                return problem_of_status(
                    403,
                    f"this server does not answer for the host {host!r:.200}. If that is its name, "
                    "start it with --allowed-hosts NAME.",
                    "foreign_host",
                )
        origin = _foreign_origin(headers, self._config.value.allowed_origins)
        return None if origin is None else problem_of_status(403, origin, "foreign_origin")


def check_origin(request: Request, allowed: Collection[str]) -> None:
    """Raise ForeignOrigin for a form that a foreign page sends: it needs no CORS preflight."""
    message = _foreign_origin(request.headers, allowed)
    if message is not None:
        raise ForeignOrigin(message)


def _foreign_origin(headers: Headers, allowed: Collection[str]) -> str | None:
    """Why the Origin is refused; None: there is none, or it is the server's own or allowed."""
    own = [host.lower() for host in headers.getlist("host")]
    for origin in headers.getlist("origin"):
        scheme, _, authority = origin.lower().partition("://")
        if ANY in allowed or origin in allowed:
            continue
        if scheme not in ("http", "https") or [authority] != own:
            return (
                f"pages of {origin!r:.200} may not use this server. To allow them, start it "
                "with --allowed-origins ORIGIN."
            )
    return None
