"""Tenants: whose requests the server runs, with which weight, limits and rights."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b, sha256
from typing import Literal

from windlass.serve.cost import NO_KEY


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Dollars that the requests of a tenant may cost in a day or month of UTC."""

    usd: float
    per: Literal["day", "month"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A sender of requests; None: no limit, or all of them."""

    name: str
    weight: float = 1.0  # share of the engine relative to other tenants
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None
    max_priority: int | None = None  # lowest number, since lower runs earlier
    models: tuple[str, ...] | None = None
    adapters: tuple[str, ...] | None = None
    budget: Budget | None = None
    admin: bool = False

    def cache_salt(self, client_salt: str | None) -> str:
        """The salt of a request: no `client_salt` reaches the cached blocks of another tenant."""
        salt = (client_salt or "").encode(errors="surrogatepass")
        key = sha256(self.name.encode()).digest()
        return blake2b(salt, key=key, digest_size=16, person=b"cache salt").hexdigest()


# The tenant of all requests to a server without keys.
NO_TENANT = Tenant(name=NO_KEY)
