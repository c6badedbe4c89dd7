"""The endpoints of named prefixes under /admin/kv; all need an admin key."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from windlass.errors import RequestError, WorkerDied
from windlass.serve.bodies import read_as, reply
from windlass.serve.json_body import decode_object
from windlass.serve.prefixes import NamedPrefix
from windlass.serve.protocol import (
    CompletionRequest,
    LoadPrefixRequest,
    SaveChatPrefixRequest,
    SavePrefixRequest,
)
from windlass.serve.services import Services
from windlass.serve.tenants import Tenant


class PrefixRoutes:
    """Saves, loads, lists and deletes named prefixes."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def add_routes(self, router: APIRouter) -> None:
        for method, path, endpoint in (
            ("POST", "/admin/kv/save", self.save),
            ("POST", "/admin/kv/load", self.load),
            ("GET", "/admin/kv", self.list),
            ("DELETE", "/admin/kv/{name}", self.delete),
        ):
            router.add_api_route(path, endpoint, methods=[method], response_model=None)

    async def save(self, request: Request) -> Response:
        """Compute a prompt or the beginning of a conversation, and keep its KV blocks."""
        self._check(request)
        body = await read_as(request, _read_save, self._services)
        prefix = await self._prefix(body, self._tenant(request, body.tenant))
        return reply(await self._services.prefixes.save(prefix))

    async def load(self, request: Request) -> Response:
        """Pin a saved prefix on the replicas that lack it."""
        self._check(request)
        body = await read_as(request, LoadPrefixRequest.read, self._services)
        return reply(await self._services.prefixes.load(body.name))

    async def list(self, request: Request) -> Response:
        self._services.keys.check_admin(request)
        return reply({"object": "list", "data": self._services.prefixes.entries()})

    async def delete(self, request: Request, name: str) -> Response:
        self._check(request)
        return reply(await self._services.prefixes.delete(name))

    def _check(self, request: Request) -> None:
        self._services.keys.check_admin(request)
        if self._services.sleeper.state != "awake":
            raise WorkerDied("the server sleeps; its KV cache is empty. POST /admin/wake wakes it.")

    def _tenant(self, request: Request, name: str | None) -> Tenant:
        """The tenant whose requests find the prefix: the named one, or the admin's own."""
        keys = self._services.keys
        if name is None:
            return keys.tenant_of(request)
        if not keys.are_needed:
            raise RequestError("this server has no tenants; leave out tenant.", "tenant")
        return keys.tenant_named(name)

    async def _prefix(
        self, body: SavePrefixRequest | SaveChatPrefixRequest, tenant: Tenant
    ) -> NamedPrefix:
        """Encode the prefix as a request of the tenant would be, with the same checks and salt."""
        services = self._services
        preparer, report = services.preparer, services.client.report
        if isinstance(body, SavePrefixRequest):
            prompt, add_special = body.prompt, body.add_special_tokens
        else:
            preparer.adapter_of(body.model, tenant)
            text = await preparer.render(body, report)
            prompt, add_special = await preparer.encode(text, False, report), False
        salt = body.cache_salt or ""
        if services.keys.are_needed and not services.config.share_prefix_cache:
            salt = tenant.cache_salt(body.cache_salt)
        fields = {
            "prompt": prompt,
            "model": body.model,
            "max_tokens": 0,
            "deterministic": body.deterministic,
            "add_special_tokens": add_special,
        }
        completion = CompletionRequest.of(fields, body.num_bytes)
        (new,) = (await preparer.completion(completion, report, tenant)).requests
        return NamedPrefix(
            name=body.name,
            model=services.card.name,
            tokens=new.prompt,
            cache_salt=salt,
            adapter=new.adapter,
            deterministic=new.sampling.deterministic,
            tenant=tenant.name,
            pin=body.pin,
        )


def _read_save(raw: bytes) -> SavePrefixRequest | SaveChatPrefixRequest:
    fields = decode_object(raw)
    kind = SaveChatPrefixRequest if "messages" in fields else SavePrefixRequest
    return kind.of(fields, len(raw))
