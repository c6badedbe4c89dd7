"""Keys: who may pass, who is an admin, and what separates one key's cache and costs from another's.

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
from windlass.serve.problems import problem_of_status

_log = logging.getLogger("windlass.serve")

# Exact paths: every other path needs a key, whether it exists or not.
_OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/health/generate", "/ping"})
_MAX_FILE_BYTES = 64 * 2**10


@dataclass(frozen=True, slots=True)
class Keys:
    """The SHA-256 digests of a server's keys. No client keys: everybody may pass."""

    clients: tuple[bytes, ...] = ()
    admins: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, config: ServeConfig) -> Keys:
        """Read the keys that `config` gives and names; a bad file is a ConfigError."""
        clients = [*config.api_key]
        for path in config.api_key_file:
            clients += _read_keys(path, "--api-key-file")
        admins = [*config.admin_key]
        for path in config.admin_key_file:
            admins += _read_keys(path, "--admin-key-file")
        return cls(tuple(map(_digest, clients)), tuple(map(_digest, admins)))

    def admits(self, request: Request) -> bool:
        return _matches(key_of(request), self.clients + self.admins)

    def is_admin(self, request: Request) -> bool:
        return _matches(key_of(request), self.admins)


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


def _matches(given: bytes | None, digests: tuple[bytes, ...]) -> bool:
    """Compare with all, by digests of one length: the time taken tells nothing about the keys."""
    if not given:
        return False
    digest = sha256(given).digest()
    matches = [hmac.compare_digest(digest, each) for each in digests]
    return any(matches)


def _read_keys(path: str, flag: str) -> list[str]:
    """The keys in a file: one per line, # begins a comment line."""
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
        raise ConfigError(f"{name} can be changed by other users. Run: chmod 600 {path}")
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


def key_of(request: Request) -> bytes | None:
    """The key that the request brings, valid or not."""
    header = request.headers.get("authorization", "")
    scheme, _, given = header.partition(" ")
    # Headers are decoded as Latin-1; a key's bytes are those of UTF-8.
    return given.strip().encode("latin-1") if scheme.lower() == "bearer" else None


def salt_of(request: Request, client_salt: str | None) -> str:
    """A cache salt for a request that the guard let pass; it does not tell the key.

    It depends on the key, so that no salt that a client chooses reaches blocks of another key.
    """
    digest = sha256(_known_key(request)).digest()
    salt = (client_salt or "").encode(errors="surrogatepass")
    return blake2b(salt, key=digest, digest_size=16, person=b"cache salt").hexdigest()


def name_of(request: Request) -> str:
    """A name for the key of a request that the guard let pass; it tells neither key nor salt."""
    return blake2b(_known_key(request), digest_size=6, person=b"key name").hexdigest()


def _known_key(request: Request) -> bytes:
    key = key_of(request)
    assert key is not None, f"{request.url.path} is not guarded"
    return key


class KeyGuard:
    """Lets requests pass that bring one of the keys; health needs none."""

    def __init__(self, app: ASGIApp, keys: Keys, root_path: str) -> None:
        self._app = app
        self._keys = keys
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._may_pass(Request(scope)):
            await self._app(scope, receive, send)
            return
        problem = problem_of_status(
            401,
            "a valid key is needed: Authorization: Bearer KEY.",
            **{"WWW-Authenticate": "Bearer"},
        )
        await problem.response()(scope, receive, send)

    def _may_pass(self, request: Request) -> bool:
        path = request.scope["path"].removeprefix(self._root_path)
        return path in _OPEN_PATHS or self._keys.admits(request)
