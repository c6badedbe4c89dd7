"""The endpoints of tenants: their settings for admins, and usage as JSON or CSV."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from windlass.errors import RequestError
from windlass.serve.abbreviate import abbreviate
from windlass.serve.bodies import read_as, reply, reply_off_loop
from windlass.serve.json_body import decode_object
from windlass.serve.problems import ObjectNotFound
from windlass.serve.services import Services
from windlass.serve.tenants import Tenant, TenantTable
from windlass.serve.usage import BUCKETS, Numbers, UsageKey, UsageQuery

_log = logging.getLogger("windlass.audit")

_DEFAULT_DAYS = 31
_DAY_S = 86_400
_CSV = "text/csv"
_PARAMS = ("since", "until", "bucket", "tenant", "format")

Endpoint = Callable[..., Awaitable[Response]]
Json = dict[str, Any]
Rows = Sequence[tuple[int, UsageKey, Numbers]]


class TenantRoutes:
    """The endpoints under /admin/tenants and /admin/usage, and /v1/usage for a tenant's own."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.gets: dict[str, Endpoint] = {
            "/admin/tenants": self.tenants,
            "/admin/usage": self.usage,
            "/v1/usage": self.own_usage,
        }
        self.patches: dict[str, Endpoint] = {"/admin/tenants/{name}": self.change}

    async def tenants(self, request: Request) -> Response:
        """GET /admin/tenants"""
        self._services.keys.check_admin(request)
        table = self._table()
        data = [self._json(tenant, table) for tenant in table.tenants.values()]
        return reply({"object": "list", "data": data})

    async def change(self, request: Request, name: str) -> Response:
        """PATCH /admin/tenants/NAME: new values by field; null removes a field."""
        keys = self._services.keys
        keys.check_admin(request)
        self._table()
        changes = await read_as(request, decode_object, self._services)
        if not changes:
            raise RequestError("the body has no field to change.")
        sender = keys.sender_of(request)  # its key may be gone after the change
        before = await keys.change(name, changes)
        for field, value in changes.items():
            # Not the values of keys: a hash may help to find out a weak key.
            is_secret = field == "keys"
            _log.info(
                "%s (key %s) changed %s of tenant %s from %s to %s",
                sender.tenant.name,
                sender.key_id,
                field,
                name,
                "its keys" if is_secret else before[field],
                "others" if is_secret else value,
            )
        table = self._table()
        return reply(self._json(table.tenants[name], table))

    async def usage(self, request: Request) -> Response:
        """GET /admin/usage"""
        self._services.keys.check_admin(request)
        return await self._usage(request, request.query_params.get("tenant"))

    async def own_usage(self, request: Request) -> Response:
        """GET /v1/usage"""
        if "tenant" in request.query_params:
            raise RequestError("tenant: GET /admin/usage shows others.", "tenant")
        return await self._usage(request, self._services.keys.tenant_of(request).name)

    # ---- helpers -----------------------------------------------------------------------------

    def _table(self) -> TenantTable:
        table = self._services.keys.table
        if table is None:
            raise ObjectNotFound("this server has no tenants. Start it with --keys-file FILE.")
        return table

    def _json(self, tenant: Tenant, table: TenantTable) -> Json:
        keys = [
            {"id": key.id, "expires": None if key.expires is None else _iso(key.expires)}
            for key in table.keys.values()
            if key.tenant == tenant.name
        ]
        fields: Json = msgspec.to_builtins(tenant)
        return {**fields, "keys": keys, **self._services.limits.state_of(tenant)}

    async def _usage(self, request: Request, tenant: str | None) -> Response:
        store = self._services.usage
        if store is None:
            raise RequestError("this server keeps no usage. Start it with --usage-db FILE.")
        query = _query(request.query_params, store.now(), tenant)
        rows = await store.read(query)
        if _wants_csv(request):
            body = await self._services.workers.releasing_gil(_csv, rows)
            disposition = {"Content-Disposition": 'attachment; filename="usage.csv"'}
            return Response(body, media_type=_CSV, headers=disposition)
        return await reply_off_loop(self._services, len(rows), _usage_json, rows, query)


def _usage_json(rows: Rows, query: UsageQuery) -> Json:
    data = [{"start": start, **key._asdict(), **numbers._asdict()} for start, key, numbers in rows]
    return {
        "object": "list",
        "bucket": query.bucket,
        "since": query.since,
        "until": query.until,
        "data": data,
    }


def _csv(rows: Rows) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("start", *UsageKey._fields, *Numbers._fields))
    for start, key, numbers in rows:
        writer.writerow((_iso(start), *key, *numbers))
    return file.getvalue()


def _wants_csv(request: Request) -> bool:
    given = request.query_params.get("format")
    if given not in (None, "json", "csv"):
        raise RequestError(f"format must be json or csv, got {abbreviate(given)}.", "format")
    return given == "csv" or (given is None and _CSV in request.headers.get("accept", ""))


def _query(params: Mapping[str, str], now: int, tenant: str | None) -> UsageQuery:
    for name in params.keys() - set(_PARAMS):
        raise RequestError(f"unknown parameter {abbreviate(name)}; known: {', '.join(_PARAMS)}.")
    bucket = params.get("bucket", "day")
    if bucket not in BUCKETS:
        raise RequestError(
            f"bucket must be one of {', '.join(BUCKETS)}, got {abbreviate(bucket)}.", "bucket"
        )
    until = _time("until", params.get("until"), now + 1)
    since = _time("since", params.get("since"), until - _DEFAULT_DAYS * _DAY_S)
    if since >= until:
        raise RequestError(
            f"since ({_iso(since)}) must be before until ({_iso(until)}).",
            "since" if "since" in params else "until",
        )
    return UsageQuery(since=since, until=until, bucket=bucket, tenant=tenant)


def _time(name: str, text: str | None, default: int) -> int:
    """Seconds since 1970 from such a number, or an ISO date or time, in UTC without an offset."""
    if text is None:
        return default
    if text.isascii() and text.isdecimal() and len(text) <= 11:
        return int(text)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise RequestError(
            f"{name} must be seconds since 1970 or a date such as 2030-01-31, got "
            f"{abbreviate(text)}.",
            name,
        ) from None
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp())


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
