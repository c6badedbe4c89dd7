"""Keeps web pages away from a server on their visitor's machine.

A page can send requests to localhost (CSRF), and a name that its owner points at 127.0.0.1 makes
them same-origin (DNS rebinding). The browser tells both: by Origin and by Host.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from functools import partial

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from windlass.config import ServeConfig
from windlass.serve.problems import Problem, problem_of_status

_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
ANY = "*"


def make_host_guard(config: ServeConfig) -> Callable[[ASGIApp], ASGIApp] | None:
    """The guard for this server's address; None: its names are not known, or no browser gets there."""
    if not config.allowed_hosts and (config.uds is not None or not _is_loopback(config.host)):
        return None
    hosts = _LOCAL | {_name_of(host) for host in (config.host, *config.allowed_hosts)}
    return partial(HostGuard, hosts=hosts, origins=frozenset(config.allowed_origins))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _name_of(authority: str) -> str:
    """A host without its port: localhost, 127.0.0.1, ::1."""
    text = authority.lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    name, _, port = text.rpartition(":")
    host = name if name and ":" not in name and port.isdecimal() else text
    return host.removesuffix(".")


class HostGuard:
    """Refuses requests for names that are not the server's, and from pages that are not."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str], origins: frozenset[str]) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
        else:
            await problem.response()(scope, receive, send)

    def _refusal(self, headers: Headers) -> Problem | None:
        hosts = headers.getlist("host")  # none: HTTP/1.0, which no browser sends
        for host in hosts:
            if ANY not in self._hosts and _name_of(host) not in self._hosts:
                return problem_of_status(
                    403,
                    f"this server does not answer for the host {host!r:.200}. If that is its name, "
                    "start it with --allowed-hosts NAME.",
                    "foreign_host",
                )
        for origin in headers.getlist("origin"):
            if not self._is_own(origin, hosts):
                return problem_of_status(
                    403,
                    f"pages of {origin!r:.200} may not use this server. To allow them, start it "
                    "with --allowed-origins ORIGIN.",
                    "foreign_origin",
                )
        return None

    def _is_own(self, origin: str, hosts: list[str]) -> bool:
        if ANY in self._origins or origin in self._origins:
            return True
        scheme, found, authority = origin.lower().partition("://")
        return bool(found) and scheme in ("http", "https") and [authority] == _lowered(hosts)


def _lowered(hosts: list[str]) -> list[str]:
    return [host.lower() for host in hosts]
