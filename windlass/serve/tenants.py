"""Tenants: whose requests the server runs, with which weight, limits and rights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from typing import Literal

from windlass.serve.cost import NO_KEY
from windlass.serve.fallback import FallbackMode
from windlass.serve.problems import NotAllowed


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
    max_priority: int | None = None  # lowest number that its requests may have: lower runs earlier
    models: tuple[str, ...] | None = None
    adapters: tuple[str, ...] | None = None
    budget: Budget | None = None
    fallback: FallbackMode | None = None  # of its requests; none: they may not ask for another
    admin: bool = False
    disabled: bool = False

    @property
    def is_limited(self) -> bool:
        """Whether its requests are counted before they run."""
        limits = (
            self.requests_per_minute,
            self.tokens_per_minute,
            self.max_concurrent_requests,
            self.budget,
        )
        return any(each is not None for each in limits)

    def may_use(self, adapter: str, model_names: Sequence[str]) -> bool:
        """Whether it may use an adapter, or with "" the model that has these names."""
        if adapter:
            return self.adapters is None or adapter in self.adapters
        return self.models is None or any(name in self.models for name in model_names)

    def priority(self, requested: int | None) -> int:
        """The priority of a request; raises NotAllowed if it asks for more than `max_priority`."""
        lowest = self.max_priority
        if lowest is not None and requested is not None and requested < lowest:
            raise NotAllowed(
                f"priority must be at least {lowest} for this key, got {requested} (lower runs earlier).",
                "priority",
            )
        return max(requested or 0, lowest) if lowest is not None else requested or 0

    def cache_salt(self, client_salt: str | None) -> str:
        """The salt of a request: no `client_salt` reaches the cached blocks of another tenant."""
        salt = (client_salt or "").encode(errors="surrogatepass")
        key = sha256(self.name.encode()).digest()
        return blake2b(salt, key=key, digest_size=16, person=b"cache salt").hexdigest()


# The tenant of all requests to a server without keys.
NO_TENANT = Tenant(name=NO_KEY)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantKey:
    """A key of the keys file. `id` is public; the key itself is not known."""

    id: str
    tenant: str
    expires: float | None = None  # seconds since 1970


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantTable:
    """The content of a keys file: tenants by name, keys by the hex digits of their SHA-256."""

    tenants: dict[str, Tenant] = field(default_factory=dict)
    keys: dict[str, TenantKey] = field(default_factory=dict)

    def has_admin(self, now: float) -> bool:
        """Whether a key has admin rights at this time."""
        return any(
            self.tenants[key.tenant].admin
            and not self.tenants[key.tenant].disabled
            and (key.expires is None or now < key.expires)
            for key in self.keys.values()
        )
