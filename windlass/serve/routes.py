"""The HTTP endpoints and their paths.

protocol.py validates request bodies, prepare.py builds engine requests and formatters.py the JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from windlass.errors import RequestError
from windlass.serve.admin import Admin
from windlass.serve.api_docs import ApiDocs
from windlass.serve.batch.routes import BatchRoutes, FileRoutes
from windlass.serve.bodies import names_unknown_fields, read_as, reply, reply_off_loop
from windlass.serve.console_routes import ConsoleRoutes
from windlass.serve.generation import Generation
from windlass.serve.generation_services import GenerationServices
from windlass.serve.health import Health
from windlass.serve.json_body import decode_object
from windlass.serve.llama_api import LlamaTokenizeRequest
from windlass.serve.llama_routes import LlamaRoutes
from windlass.serve.ollama_routes import OllamaRoutes
from windlass.serve.pooling import Pooling
from windlass.serve.prefix_routes import PrefixRoutes
from windlass.serve.protocol import (
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeChatRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from windlass.serve.services import Services
from windlass.serve.tenant_routes import TenantRoutes
from windlass.serve.trace_routes import TraceRoutes
from windlass.version import __version__

Endpoint = Callable[..., Awaitable[Response]]


class Texts:
    """The endpoints for text, tokens and chat templates, which do not use the engine."""

    def __init__(self, services: Services) -> None:
        self._services = services

    @names_unknown_fields
    async def tokenize(self, request: Request) -> Response:
        preparer, report = self._services.preparer, self._services.client.report
        body = await read_as(request, _read_tokenize, self._services)
        preparer.adapter_of(body.model, self._services.keys.tenant_of(request))
        if isinstance(body, LlamaTokenizeRequest):
            tokens = await preparer.encode(body.content, body.add_special, report)
            return await reply_off_loop(
                self._services, len(tokens), self._llama_tokens, tokens, body.with_pieces
            )
        if isinstance(body, TokenizeRequest):
            text = body.prompt
        else:
            text = await preparer.render(body, report)
        tokens = await preparer.encode(text, body.add_special_tokens, report)
        return await reply_off_loop(
            self._services, len(tokens), self._tokenized, tokens, body.return_token_strs
        )

    def _tokenized(self, tokens: list[int], with_texts: bool) -> dict[str, object]:
        token_text = self._services.card.tokenizer.token_text
        return {
            "tokens": tokens,
            "count": len(tokens),
            "max_model_len": self._services.client.report.max_model_len,
            "token_strs": [token_text(t) for t in tokens] if with_texts else None,
        }

    def _llama_tokens(self, tokens: list[int], with_pieces: bool) -> dict[str, object]:
        if not with_pieces:
            return {"tokens": tokens}
        token_bytes = self._services.card.tokenizer.token_bytes
        return {"tokens": [{"id": token, "piece": _piece(token_bytes(token))} for token in tokens]}

    @names_unknown_fields
    async def detokenize(self, request: Request) -> Response:
        body = await read_as(request, DetokenizeRequest.read, self._services)
        tenant = self._services.keys.tenant_of(request)
        self._services.preparer.adapter_of(body.model, tenant)
        max_tokens = self._services.client.report.max_model_len
        if len(body.tokens) > max_tokens:
            raise RequestError(
                f"tokens has {len(body.tokens):,} ids; at most {max_tokens:,} are accepted, the "
                "model's context.",
                "tokens",
            )
        return await reply_off_loop(
            self._services, len(body.tokens), self._detokenized, body.tokens
        )

    def _detokenized(self, tokens: list[int]) -> dict[str, object]:
        tokenizer = self._services.card.tokenizer
        bad = next((token for token in tokens if token >= tokenizer.vocab_size), None)
        if bad is not None:
            raise RequestError(
                f"tokens has {bad}; ids end at {tokenizer.vocab_size - 1}.", "tokens"
            )
        text = tokenizer.decode(tokens, skip_special=False)
        return {"prompt": text, "content": text}  # vLLM's name and llama-server's

    @names_unknown_fields
    async def apply_template(self, request: Request) -> Response:
        body = await read_as(request, TokenizeChatRequest.read, self._services)
        tenant = self._services.keys.tenant_of(request)
        self._services.preparer.adapter_of(body.model, tenant)
        report = self._services.client.report
        return reply({"prompt": await self._services.preparer.render(body, report)})


def _read_tokenize(raw: bytes) -> TokenizeRequest | TokenizeChatRequest | LlamaTokenizeRequest:
    """Read a body for /tokenize: a text or a conversation, or llama-server's form of a text."""
    fields = decode_object(raw)
    if "content" in fields:
        return LlamaTokenizeRequest.of(fields, len(raw))
    kind = TokenizeChatRequest if "messages" in fields else TokenizeRequest
    return kind.of(fields, len(raw))


def _piece(text: bytes) -> str | list[int]:
    """A token's text, or its bytes where it is only a part of a character."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return list(text)


class Operations:
    """The endpoints for operators and monitoring."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def models(self, request: Request) -> Response:
        return reply({"object": "list", "data": self._entries(request)})

    async def model(self, request: Request, name: str) -> Response:
        """One model or adapter; the name may contain slashes."""
        if not name:  # the path was /v1/models/
            return await self.models(request)
        tenant = self._services.keys.tenant_of(request)
        self._services.preparer.adapter_of(name, tenant)  # raises ModelNotFound
        return reply(next(entry for entry in self._entries(request) if entry["id"] == name))

    def _entries(self, request: Request) -> list[dict[str, object]]:
        """The model and its adapters, as far as the request's tenant may use them."""
        card = self._services.card
        common = {
            "object": "model",
            "created": self._services.started,
            "owned_by": "windlass",
            "max_model_len": self._services.client.report.max_model_len,
        }
        tenant = self._services.keys.tenant_of(request)
        own = [
            {"id": name, **common, "root": card.path, "parent": None}
            for name in (card.name, *card.aliases)
            if tenant.may_use("", (name,))
        ]
        folders = self._services.client.adapters.folders
        return own + [
            {"id": name, **common, "root": folder, "parent": card.name}
            for name, folder in folders.items()
            if tenant.may_use(name, ())
        ]

    async def live(self) -> Response:
        """Liveness: fails only when the engine has failed for good and a restart would help."""
        if self._services.client.failed.is_set():
            return _health(self._services.client.health())
        return _health(Health(True))

    async def ready(self) -> Response:
        return _health(self._services.readiness())

    async def generate_probe(self) -> Response:
        """Generate one token, which detects a hang anywhere in the engine."""
        health = self._services.readiness()
        if not health.ok:
            return _health(health)
        running = [
            probe.run()
            for probe, replica in zip(
                self._services.probes, self._services.client.replicas, strict=True
            )
            if replica.health().ok
        ]
        results = await asyncio.gather(*running)
        reasons = [health.reason, *(each.error for each in results)]
        reason = "; ".join(each for each in reasons if each)
        seconds = [each.seconds for each in results if each.error is None]
        if not seconds:
            return _health(Health(False, reason))
        status = {"status": "degraded", "reason": reason} if reason else {"status": "ok"}
        return reply({**status, "seconds": round(max(seconds), 4)})

    async def version(self) -> Response:
        return reply({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        """All metrics; for a tenant's key without those of other tenants."""
        keys = self._services.keys
        sender = keys.tenant_of(request)
        owner = sender.name if keys.are_needed and not sender.admin else None
        await self._services.metrics.refresh_workers()
        up = [replica.health().ok for replica in self._services.client.replicas]
        body = self._services.metrics.render(up, self._services.sleeper.level, owner)
        return Response(body, media_type=CONTENT_TYPE_LATEST)

    async def load(self) -> Response:
        backlog = self._services.client.backlog
        return reply(
            {
                "server_load": self._services.desk.num_in_flight,
                "num_requests_running": backlog.num_running,
                "num_requests_waiting": backlog.num_waiting + backlog.num_unseen,
                "num_waiting_tokens": backlog.num_tokens,
            }
        )


class AdapterChanges:
    """The endpoints that load and unload adapters; they need an admin key."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def load(self, request: Request) -> Response:
        self._services.keys.check_admin(request)
        body = await read_as(request, LoadAdapterRequest.read, self._services)
        await self._services.adapter_manager.load(body.lora_name, body.lora_path)
        return reply({"status": "loaded", "id": body.lora_name})

    async def unload(self, request: Request) -> Response:
        self._services.keys.check_admin(request)
        body = await read_as(request, UnloadAdapterRequest.read, self._services)
        num_running = await self._services.adapter_manager.unload(body.lora_name)
        status = "draining" if num_running else "unloaded"
        return reply({"status": status, "id": body.lora_name, "num_running": num_running})


def _health(health: Health) -> Response:
    if not health.reason:
        return reply({"status": "ok"})
    body: dict[str, object] = {"status": health.status, "reason": health.reason}
    if not health.ok:  # llama-server's clients read it
        body["error"] = {"code": 503, "message": health.reason, "type": "unavailable_error"}
    return reply(body, 200 if health.ok else 503)


def batch_endpoints(generation: Generation, pooling: Pooling) -> dict[str, Endpoint]:
    """The endpoints that batches may use."""
    return {
        "/v1/chat/completions": generation.chat,
        "/v1/completions": generation.completion,
        "/v1/responses": generation.response,
        "/v1/embeddings": pooling.embeddings,
        "/v1/score": pooling.score,
        "/v1/rerank": pooling.rerank,
    }


def _streams(generation: Generation) -> dict[str, Endpoint]:
    """The endpoints that generate text and keep nothing: HTTP workers run them."""
    return {
        "/v1/chat/completions": generation.chat,
        "/v1/completions": generation.completion,
        "/v1/messages": generation.messages,
        "/api/chat": generation.ollama_chat,
        "/api/generate": generation.ollama_generate,
    }


def _pooling(pooling: Pooling) -> dict[str, Endpoint]:
    """The endpoints that compute embeddings and scores."""
    return {
        "/v1/embeddings": pooling.embeddings,
        "/api/embed": pooling.ollama_embed,
        "/api/embeddings": pooling.ollama_embeddings,
        "/v1/score": pooling.score,
        "/score": pooling.score,
        "/v1/rerank": pooling.rerank,
        "/v2/rerank": pooling.rerank,
        "/rerank": pooling.rerank,
    }


def make_worker_router(services: GenerationServices) -> tuple[APIRouter, frozenset[str]]:
    """Create the router of an HTTP worker; returns its paths, too."""
    router, posts = APIRouter(), _streams(Generation(services))
    for path, endpoint in posts.items():
        router.add_api_route(path, endpoint, methods=["POST"], response_model=None)
    return router, frozenset(posts)


def make_router(services: Services) -> APIRouter:
    """Create the router with all endpoints of one server."""
    generation, texts, operations = Generation(services), Texts(services), Operations(services)
    changes, trace_routes, admin = AdapterChanges(services), TraceRoutes(services), Admin(services)
    ollama, pooling = OllamaRoutes(services), Pooling(services)
    files, batches, tenants = FileRoutes(services), BatchRoutes(services), TenantRoutes(services)
    if services.batches is not None:
        services.batches.endpoints = batch_endpoints(generation, pooling)
    router = APIRouter()
    posts: dict[str, Endpoint] = {
        **_streams(generation),
        "/v1/responses": generation.response,
        "/api/show": ollama.show,
        "/v1/messages/count_tokens": generation.count_tokens,
        **_pooling(pooling),
        "/tokenize": texts.tokenize,
        "/detokenize": texts.detokenize,
        "/apply-template": texts.apply_template,
        "/admin/sleep": admin.sleep,
        "/admin/wake": admin.wake,
        "/admin/reset_prefix_cache": admin.reset_prefix_cache,
        "/sleep": admin.sleep,
        "/wake_up": admin.wake,
        "/reset_prefix_cache": admin.reset_prefix_cache,
        "/v1/load_lora_adapter": changes.load,
        "/v1/unload_lora_adapter": changes.unload,
        "/v1/files": files.upload,
        "/v1/batches": batches.create,
        "/v1/batches/{batch_id}/cancel": batches.cancel,
    }
    gets: dict[str, Endpoint] = {
        "/v1/models": operations.models,
        "/api/tags": ollama.tags,
        "/api/version": operations.version,
        "/v1/models/{name:path}": operations.model,
        "/health": operations.ready,
        "/health/live": operations.live,
        "/health/ready": operations.ready,
        "/health/generate": operations.generate_probe,
        "/ping": operations.ready,
        "/version": operations.version,
        "/metrics": operations.metrics,
        "/load": operations.load,
        "/memory": admin.memory,
        **tenants.gets,
        "/is_sleeping": admin.is_sleeping,
        "/admin/config": admin.config,
        "/admin/config/history": admin.config_history,
        "/cost": trace_routes.cost,
        "/v1/requests/{response_id:path}/explain": trace_routes.explain,
        "/v1/responses/{response_id}": generation.stored_response,
        "/v1/files": files.list,
        "/v1/files/{file_id}": files.retrieve,
        "/v1/files/{file_id}/content": files.content,
        "/v1/batches": batches.list,
        "/v1/batches/{batch_id}": batches.retrieve,
    }
    llama = LlamaRoutes(services)
    posts |= dict.fromkeys(("/completion", "/completions"), generation.llama_completion)
    posts["/infill"] = generation.llama_infill
    gets |= {"/props": llama.props, "/slots": llama.slots, "/v1/health": operations.ready}
    if services.config.console:
        gets |= ConsoleRoutes(services, trace_routes).endpoints()
    deletes: dict[str, Endpoint] = {
        "/v1/responses/{response_id}": generation.delete_response,
        "/v1/files/{file_id}": files.delete,
    }
    patches: dict[str, Endpoint] = {"/admin/config": admin.change_config, **tenants.patches}
    by_methods = {"POST": posts, "GET,HEAD": gets, "DELETE": deletes, "PATCH": patches}
    for methods, endpoints in by_methods.items():
        for path, endpoint in endpoints.items():
            router.add_api_route(path, endpoint, methods=methods.split(","), response_model=None)
    PrefixRoutes(services).add_routes(router)
    ApiDocs(services, router).add_routes()
    return router
