"""API keys: authentication, admin rights, and the tenant of each key.

Keys come from flags and files; the command line adds those of the environment (cli/secrets.py).
"""

from __future__ import annotations

import hmac
import logging
import os
import stat
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from windlass.config import ServeConfig, check_key
from windlass.errors import ConfigError
from windlass.serve.problems import AdminOnly, problem_of_status
from windlass.serve.tenants import NO_TENANT, Tenant

_log = logging.getLogger("windlass.serve")

# Exact paths: every other path needs a key, also one that does not exist.
_OPEN_PATHS = frozenset(
    {
        *("/health", "/health/live", "/health/ready", "/health/generate", "/ping", "/v1/health"),
        *("/openapi.json", "/docs", "/docs/docs.css", "/docs/docs.js", "/docs/icon.svg"),
    }
)
_KEY_HEADERS = ("x-api-key", "api-key")  # Anthropic's and Azure's
BATCH_OWNER = "windlass.batch_owner"  # scope key: the name of the tenant that made the batch
_MAX_FILE_BYTES = 64 * 2**10


@dataclass(frozen=True, slots=True)
class Keys:
    """The SHA-256 digests of a server's keys. Without client keys, every request is admitted."""

    clients: tuple[bytes, ...] = ()
    admins: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, config: ServeConfig) -> Keys:
        """Read the keys and key files of `config`; a bad file is a ConfigError."""
        clients = [*config.api_key]
        for path in config.api_key_file:
            clients += _read_keys(path, "--api-key-file")
        admins = [*config.admin_key]
        for path in config.admin_key_file:
            admins += _read_keys(path, "--admin-key-file")
        return cls(tuple(map(_digest, clients)), tuple(map(_digest, admins)))

    def admits(self, request: Request) -> bool:
        return _matches(given_key(request), self.clients + self.admins)

    def is_admin(self, request: Request) -> bool:
        return _matches(given_key(request), self.admins)

    def tenant_of(self, request: Request) -> Tenant:
        """The tenant of an authenticated request."""
        if BATCH_OWNER in request.scope:
            return Tenant(name=request.scope[BATCH_OWNER])
        is_admin = self.is_admin(request)
        name = key_name(request) if self.clients else NO_TENANT.name
        return Tenant(name=name, admin=is_admin)

    def check_admin(self, request: Request) -> None:
        """Raise AdminOnly unless the request has an admin key."""
        if not self.admins:
            raise AdminOnly("this server has no admin key. Start it with --admin-key KEY.")
        if not self.is_admin(request):
            raise AdminOnly("an admin key is needed: Authorization: Bearer KEY.")


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


def _matches(given: bytes | None, digests: tuple[bytes, ...]) -> bool:
    """Compare with all digests, which have one length: the time reveals nothing about the keys."""
    if not given:
        return False
    digest = sha256(given).digest()
    matches = [hmac.compare_digest(digest, each) for each in digests]
    return any(matches)


def _read_keys(path: str, flag: str) -> list[str]:
    """Read a key file: one key per line; a line that starts with # is a comment."""
    name = f"{flag} {path}"
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(_MAX_FILE_BYTES + 1)
        text = raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read: {error}.") from error
    if len(raw) > _MAX_FILE_BYTES:
        raise ConfigError(f"{name} is larger than {_MAX_FILE_BYTES} bytes: not a file of keys.")
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"{name} can be written by other users. Run: chmod 600 {path}")
    if mode & stat.S_IROTH:
        _log.warning("%s can be read by other users; chmod 600 keeps the keys secret", name)
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        key = line.strip()
        if key and not key.startswith("#"):
            check_key(key, f"{name} line {number}")
            keys.append(key)
    if not keys:
        raise ConfigError(f"{name} has no key: write one per line.")
    return keys


def given_key(request: Request) -> bytes | None:
    """The key in the Authorization header, or in that of other APIs, valid or not."""
    header = request.headers.get("authorization", "")
    scheme, _, given = header.partition(" ")
    if scheme.lower() != "bearer":
        given = next((key for name in _KEY_HEADERS if (key := request.headers.get(name))), "")
    # Starlette decodes headers as Latin-1; keys are UTF-8.
    return given.strip().encode("latin-1") or None


def key_name(request: Request) -> str:
    """A public name for the key of an authenticated request; it does not reveal the key."""
    key = given_key(request)
    assert key is not None, f"{request.url.path} is not authenticated"
    return blake2b(key, digest_size=6, person=b"key name").hexdigest()


class KeyGuard:
    """Middleware that answers 401 to requests without a valid key, except on health paths, docs and `open_paths`."""

    def __init__(
        self, app: ASGIApp, *, keys: Keys, root_path: str, open_paths: frozenset[str] = frozenset()
    ) -> None:
        self._app = app
        self._keys = keys
        self._root_path = root_path
        self._open_paths = _OPEN_PATHS | open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_allowed(Request(scope)):
            await self._app(scope, receive, send)
            return
        problem = problem_of_status(
            401,
            "a valid key is needed: Authorization: Bearer KEY.",
            **{"WWW-Authenticate": "Bearer"},
        )
        problem.log(scope["path"], Request(scope).headers.get("x-request-id", ""))
        await problem.response(scope["path"])(scope, receive, send)

    def _is_allowed(self, request: Request) -> bool:
        path = request.scope["path"].removeprefix(self._root_path)
        return path in self._open_paths or self._keys.admits(request)
