"""Keys: who may pass, and the salt that keeps the cached prefixes of one key from another's.

Knows nothing of what a key's owner may do beyond passing.
"""

from __future__ import annotations

import hmac
from hashlib import blake2b

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from windlass.serve.problems import problem_of_status

# Exact paths: whatever else is asked for needs a key, whether it exists or not.
_OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/health/generate", "/ping"})


def key_of(request: Request) -> bytes | None:
    """The key that the request brings, valid or not."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip().encode() if scheme.lower() == "bearer" else None


def salt_of(request: Request) -> str:
    """A cache salt made of the key of a request that the guard let pass; it does not tell the key."""
    key = key_of(request)
    assert key is not None, f"{request.url.path} is not guarded"
    return blake2b(key, digest_size=16, person=b"cache salt").hexdigest()


def name_of(request: Request) -> str:
    """A name for the key of a request that the guard let pass; it tells neither key nor salt."""
    key = key_of(request)
    assert key is not None, f"{request.url.path} is not guarded"
    return blake2b(key, digest_size=6, person=b"key name").hexdigest()


class KeyGuard:
    """Lets requests pass that bring one of the keys; health needs none."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], root_path: str) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
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
        if request.scope["path"].removeprefix(self._root_path) in _OPEN_PATHS:
            return True
        given = key_of(request)
        if given is None:
            return False
        # All are compared, so that the time taken tells nothing about which one nearly fits.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return any(matches)
