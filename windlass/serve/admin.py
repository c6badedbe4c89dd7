"""The admin endpoints: memory report, sleep and wake, prefix cache reset, live configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from windlass.core.memory import AdapterUse, Memory
from windlass.errors import RequestError, WorkerDied
from windlass.serve.abbreviate import abbreviate
from windlass.serve.bodies import decode_as, read_body, reply
from windlass.serve.config_admin import MAX_PATCH_BYTES
from windlass.serve.cost import NO_KEY
from windlass.serve.json_body import decode_object
from windlass.serve.problems import ConfigConflict
from windlass.serve.protocol import SleepRequest, WakeRequest
from windlass.serve.services import Services
from windlass.serve.tenants import Tenant

T = TypeVar("T")

_NUMBERS = {"level": int, "timeout_s": float}


class Admin:
    """All endpoints but the memory report need an admin key."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def memory(self, request: Request) -> Response:
        """The memory report; without figures while the engine process is stopped."""
        sleeper = self._services.sleeper
        state = {"state": sleeper.state, "level": sleeper.level}
        if sleeper.level == 2:
            return reply({**state, "blocks": None, "parts": None})
        client = self._services.client
        tenant = self._services.keys.tenant_of(request)
        reports = {
            index: memory_json(
                memory, client.replicas[index].report.capacity.bytes_per_block, tenant
            )
            for index, memory in (await client.memory()).items()
        }
        if len(client.replicas) == 1:
            return reply({**state, **reports[0]})
        replicas = [{"replica": index, **report} for index, report in reports.items()]
        return reply({**state, "replicas": replicas})

    async def sleep(self, request: Request) -> Response:
        body = await self._read(request, SleepRequest.read)
        result = await self._services.sleeper.sleep(body.level, body.mode, body.timeout_s)
        return reply({"status": "sleeping", **msgspec.to_builtins(result)})

    async def wake(self, request: Request) -> Response:
        await self._read(request, WakeRequest.read)
        result = await self._services.sleeper.wake()
        return reply({"status": "awake", **msgspec.to_builtins(result)})

    async def is_sleeping(self) -> Response:
        return reply({"is_sleeping": self._services.sleeper.state != "awake"})

    async def reset_prefix_cache(self, request: Request) -> Response:
        self._services.keys.check_admin(request)
        if self._services.sleeper.level:
            raise WorkerDied("the server sleeps; its prefix cache is empty.")
        return reply({"num_blocks": await self._services.client.reset_prefix_cache()})

    async def config(self, request: Request) -> Response:
        """All settings; their version is also the ETag."""
        self._services.keys.check_admin(request)
        return self._with_version(self._services.config_admin.describe())

    async def change_config(self, request: Request) -> Response:
        keys, admin = self._services.keys, self._services.config_admin
        keys.check_admin(request)
        given = decode_object(await read_body(request, MAX_PATCH_BYTES))
        version = _expected_version(given.pop("version", None), request.headers.get("if-match"))
        sender = keys.sender_of(request)
        # The tenant is that of all clients if only admins have keys.
        by = sender.key_id if sender.tenant.name == NO_KEY else sender.tenant.name
        async with keys.changing:  # no tenant gets a budget meanwhile
            change = admin.change(given, by=by, version=version)
        await admin.history.save()
        return self._with_version({"version": change.version, "changes": change.changes})

    async def config_history(self, request: Request) -> Response:
        self._services.keys.check_admin(request)
        return reply({"object": "list", "data": [*self._services.config_admin.history.entries]})

    def _with_version(self, body: dict[str, Any]) -> Response:
        response = reply(body)
        response.headers["ETag"] = f'"{body["version"]}"'
        return response

    async def _read(self, request: Request, read: Callable[[bytes], T]) -> T:
        """Read an admin's JSON body, or the same fields from the query string as vLLM accepts them."""
        self._services.keys.check_admin(request)
        raw = await read_body(request, self._services.config.max_body_bytes)
        if not raw:
            fields = {name: _value(name, text) for name, text in _query(request)}
            raw = msgspec.json.encode(fields)
        return await decode_as(raw, read, self._services)


def _expected_version(given: Any, if_match: str | None) -> int | None:
    """The version that a change is for, from the body or If-Match; None: any."""
    if given is not None and (not isinstance(given, int) or isinstance(given, bool)):
        raise RequestError(
            f"version must be a number that GET /admin/config returned, got {abbreviate(given)}.",
            "version",
        )
    if if_match is None or if_match.strip() == "*":
        return given
    tag = if_match.strip().strip('"')
    if not tag.isdecimal() or given not in (None, int(tag)):
        raise ConfigConflict(
            f"If-Match is {abbreviate(if_match)}; the version that GET /admin/config returned is "
            "expected, as in its ETag."
        )
    return int(tag)


def _query(request: Request) -> list[tuple[str, str]]:
    return list(request.query_params.items())


def _value(name: str, text: str) -> Any:
    """Convert the numeric fields; validation rejects text that is not a number."""
    try:
        return _NUMBERS[name](text)
    except (KeyError, ValueError):
        return text


def memory_json(memory: Memory, per_block: int, tenant: Tenant) -> dict[str, Any]:
    """Format the memory report: KV blocks by use, memory by purpose, the unaccounted rest, and the tenant's adapters."""
    use = memory.blocks
    counts = {"used": use.num_used, "cached": use.num_cached, "free": use.num_free}
    body: dict[str, Any] = {
        "blocks": {
            "block_size": use.block_size,
            "bytes_per_block": per_block,
            **{
                name: {"blocks": count, "bytes": count * per_block}
                for name, count in counts.items()
            },
            "unfilled": {
                "tokens": use.num_unfilled,
                "bytes": use.num_unfilled * per_block // use.block_size,
            },
        },
        "parts": None,
        "adapters": [
            _adapter_json(each) for each in memory.adapters if tenant.may_use(each.name, ())
        ],
    }
    held = memory.held
    if held is not None:
        body |= {
            "device": held.device,
            "parts": msgspec.to_builtins(held.parts),
            "total_bytes": held.total,
            "file_bytes": held.files,
            "unaccounted_bytes": held.unaccounted,
            "device_free_bytes": held.device_free,
            "device_total_bytes": held.device_total,
        }
    return body


def _adapter_json(use: AdapterUse) -> dict[str, Any]:
    return {
        "name": use.name,
        "place": use.place,
        "rank": None if use.size is None else use.size.rank,
        "bytes": None if use.size is None else use.size.num_bytes,
        "running": use.num_running,
        "waiting": use.num_waiting,
        "requests": use.num_requests,
    }
