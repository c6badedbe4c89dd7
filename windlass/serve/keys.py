"""API keys: authentication, admin rights, and the tenant of each key.

Keys come from flags and files; the command line adds those of the environment (cli/secrets.py).
keys_file.py reads the tenants of --keys-file.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b, sha256
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from windlass.config import ServeConfig, check_key
from windlass.errors import ConfigError, RequestError
from windlass.serve.keys_file import KEY_NAME, KeysFile, read_private
from windlass.serve.problems import AdminOnly, InvalidKey, NotAllowed, problem_of
from windlass.serve.tenants import NO_TENANT, Tenant, TenantTable

# Exact paths: every other path needs a key, also one that does not exist.
_OPEN_PATHS = frozenset(
    {
        *("/health", "/health/live", "/health/ready", "/health/generate", "/ping", "/v1/health"),
        *("/openapi.json", "/docs", "/docs/docs.css", "/docs/docs.js", "/docs/icon.svg"),
    }
)
_KEY_HEADERS = (b"x-api-key", b"api-key")  # Anthropic's and Azure's
BATCH_OWNER = "windlass.batch_owner"  # scope key: the name of the tenant that made the batch
BATCH_KEY_ID = "batch"
_MAX_FILE_BYTES = 64 * 2**10


@dataclass(frozen=True, slots=True)
class Sender:
    """The tenant of a request, and the public id of its key."""

    tenant: Tenant
    key_id: str


class Keys:
    """The keys of a server as SHA-256 digests. `table`: of the keys file, replaced when it changes."""

    def __init__(
        self,
        clients: tuple[bytes, ...] = (),
        admins: tuple[bytes, ...] = (),
        *,
        file: KeysFile | None = None,
        table: TenantTable | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.clients, self.admins = clients, admins
        self.table = table
        self._file = file
        self._clock = clock
        self._changing = asyncio.Lock()

    @classmethod
    def of(cls, config: ServeConfig, table: TenantTable | None = None) -> Keys:
        """Read the keys and key files of `config`; a bad file is a ConfigError.

        `table`: the tenants, if another process has read the keys file.
        """
        clients = [*config.api_key]
        for path in config.api_key_file:
            clients += _read_keys(path, "--api-key-file")
        admins = [*config.admin_key]
        for path in config.admin_key_file:
            admins += _read_keys(path, "--admin-key-file")
        file = None if config.keys_file is None else KeysFile(config.keys_file, config)
        return cls(
            tuple(map(_digest, clients)),
            tuple(map(_digest, admins)),
            file=file,
            table=file.read() if table is None and file is not None else table,
        )

    @property
    def are_needed(self) -> bool:
        """Whether requests need a key. An admin key alone protects only the admin endpoints."""
        return bool(self.clients) or self.table is not None

    # ---- the server's config -----------------------------------------------------------------

    def use_config(self, config: ServeConfig) -> None:
        """Check later changes of the keys file against `config`."""
        if self._file is not None:
            self._file.config = config

    def check_config(self, config: ServeConfig) -> None:
        """Raise RequestError if the budget of a tenant would never be spent with `config`."""
        tenants = {} if self.table is None else self.table.tenants
        names = [name for name, tenant in tenants.items() if tenant.budget is not None]
        if names and not config.price_per_hour:
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            raise RequestError(
                f"price_per_hour must be above 0 while tenants have budgets in dollars ({shown}): they "
                "would never be spent. Remove the budgets first: PATCH /admin/tenants/NAME with "
                '{"budget": null}.',
                "price_per_hour",
            )

    @property
    def changing(self) -> asyncio.Lock:
        """Held while the tenants change: hold it to check something against them and to act on it."""
        return self._changing

    # ---- requests ----------------------------------------------------------------------------

    def sender_of(self, request: Request) -> Sender:
        """Authenticate a request; raises InvalidKey."""
        if BATCH_OWNER in request.scope:
            return Sender(self._batch_tenant(request.scope[BATCH_OWNER]), BATCH_KEY_ID)
        key = given_key(request)
        found = None if key is None or self.table is None else self._from_table(key, self.table)
        if found is not None:
            return found
        is_admin = _matches(key, self.admins)
        if not self.are_needed:
            if key is not None and is_admin:
                return Sender(replace(NO_TENANT, admin=True), _key_name(key))
            return Sender(NO_TENANT, NO_TENANT.name)
        if key is None or not (is_admin or _matches(key, self.clients)):
            raise InvalidKey("a valid key is needed: Authorization: Bearer KEY.")
        name = _key_name(key)
        return Sender(Tenant(name=name, admin=is_admin), name)

    def tenant_of(self, request: Request) -> Tenant:
        """The tenant of an authenticated request."""
        return self.sender_of(request).tenant

    def is_admin(self, request: Request) -> bool:
        return self.sender_of(request).tenant.admin

    def check_admin(self, request: Request) -> None:
        """Raise AdminOnly unless the request has an admin key."""
        tenants = () if self.table is None else self.table.tenants.values()
        if not self.admins and not any(tenant.admin for tenant in tenants):
            raise AdminOnly("this server has no admin key. Start it with --admin-key KEY.")
        if not self.is_admin(request):
            raise AdminOnly("an admin key is needed: Authorization: Bearer KEY.")

    def _from_table(self, key: bytes, table: TenantTable) -> Sender | None:
        # The time of the lookup depends on the digest of the given key, which reveals nothing of others.
        found = table.keys.get(sha256(key).hexdigest())
        if found is None:
            return None
        if found.expires is not None and self._clock() >= found.expires:
            raise InvalidKey(f"the key {found.id!r} has expired.")
        tenant = table.tenants[found.tenant]
        if tenant.disabled:
            raise InvalidKey(f"the tenant {tenant.name!r} is disabled.")
        return Sender(tenant, found.id)

    def tenant_named(self, name: str) -> Tenant:
        """A tenant of the keys file, or that of a key without one, by its public id."""
        if KEY_NAME.fullmatch(name):
            return Tenant(name=name)
        tenants = {} if self.table is None else self.table.tenants
        if name not in tenants:
            raise RequestError(
                f"there is no tenant {name!r:.200} in the keys file. It has {len(tenants)} tenants: GET "
                "/admin/tenants.",
                "tenant",
            )
        return tenants[name]

    def _batch_tenant(self, owner: str) -> Tenant:
        """The tenant of a batch; its key may be gone, and batches of a gone or disabled tenant end."""
        if self.table is None or owner == NO_TENANT.name or KEY_NAME.fullmatch(owner):
            return Tenant(name=owner)
        tenant = self.table.tenants.get(owner)
        if tenant is None or tenant.disabled:
            raise NotAllowed(f"the tenant {owner!r} is disabled, or no longer in the keys file.")
        return tenant

    # ---- the keys file -----------------------------------------------------------------------

    async def reload(self) -> str:
        """Use the keys file as it is now; raises ConfigError and changes nothing if it is bad."""
        assert self._file is not None
        async with self._changing:
            self.table = table = await asyncio.to_thread(self._file.read)
        return f"{len(table.tenants)} tenants with {len(table.keys)} keys"

    async def change(self, tenant: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Change fields of a tenant, in the file and at once; returns what they were before."""
        if self._file is None:
            raise ConfigError("this server has no tenants. Start it with --keys-file FILE.")
        async with self._changing:
            before, self.table = await asyncio.to_thread(
                self._file.change, tenant, changes, check=self._check_admin_stays
            )
        return before

    def _check_admin_stays(self, table: TenantTable) -> None:
        """Raise RequestError if a change takes the admin rights of the last key that has them."""
        if self.admins or self.table is None:
            return
        now = self._clock()
        if self.table.has_admin(now) and not table.has_admin(now):
            raise RequestError(
                "the change would leave no key with admin rights, which could undo it. Give them to "
                "another tenant first, or edit the keys file and send SIGHUP."
            )


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
    name, keys = f"{flag} {path}", []
    for number, line in enumerate(read_private(path, flag, _MAX_FILE_BYTES).splitlines(), 1):
        key = line.strip()
        if key and not key.startswith("#"):
            check_key(key, f"{name} line {number}")
            keys.append(key)
    if not keys:
        raise ConfigError(f"{name} has no key: write one per line.")
    return keys


def given_key(request: Request) -> bytes | None:
    """The key in the Authorization header, or in that of other APIs, valid or not."""
    headers = dict(reversed(request.scope["headers"]))  # of equal names, the first
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer":
        given = next((key for name in _KEY_HEADERS if (key := headers.get(name))), b"")
    return given.strip() or None


def _key_name(key: bytes) -> str:
    """A public name for a key, which does not reveal it."""
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
        try:
            if scope["type"] == "http":
                self._check(Request(scope))
        except InvalidKey as error:
            problem = problem_of(error)
            problem.log(scope["path"], Request(scope).headers.get("x-request-id", ""))
            await problem.response(scope["path"])(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, request: Request) -> None:
        if request.scope["path"].removeprefix(self._root_path) not in self._open_paths:
            self._keys.sender_of(request)
