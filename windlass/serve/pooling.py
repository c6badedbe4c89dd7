"""The endpoints for embeddings, scores and reranking.

The inputs of one HTTP request go to the engine in groups, so that a large request does not fill the queue.
"""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from windlass.core.pooling import PoolingParams
from windlass.core.types import BATCH_PRIORITY, NewRequest, Output
from windlass.errors import RequestError
from windlass.serve import body_limits as limits
from windlass.serve.bodies import read_as, request_id_header, unknown_fields_header
from windlass.serve.cost import cost_json
from windlass.serve.desk import Ticket
from windlass.serve.keys import BATCH_OWNER, Sender
from windlass.serve.ollama_api import OllamaEmbeddingsRequest, OllamaEmbedRequest
from windlass.serve.pooling_api import (
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from windlass.serve.prepare import as_prompts
from windlass.serve.response import cancel_on_disconnect, ended_on_error
from windlass.serve.services import Services
from windlass.serve.tenants import Tenant
from windlass.serve.trace_store import Entry
from windlass.text.request_builder import EncodedPrompt, RequestBuilder, RequestOptions
from windlass.text.scoring import Pair, as_pairs

Json = dict[str, Any]
B = TypeVar("B", bound=PoolingRequest)
T = TypeVar("T")

_INLINE_CHARS = 1_000  # encoded on the event loop
_INLINE_NUMBERS = 4_096  # formatted on the event loop
_NUM_LANES = 2  # groups of one HTTP request in the engine at the same time
_PROMPT_FIELDS = ("input", "prompt")  # in errors of the request builder
_GROUP_TOKENS = 2**16  # the message of a group is encoded on the event loop


@dataclass(frozen=True, slots=True)
class _Pooled:
    """The vectors of one HTTP request, and its usage."""

    response_id: str
    model: str
    vectors: list[bytes]
    usage: Json

    @property
    def num_numbers(self) -> int:
        return sum(map(len, self.vectors)) // 4  # float32

    def head(self, **fields: Any) -> Json:
        created = int(time.time())
        return {"id": self.response_id, "created": created, "model": self.model, **fields}


@dataclass(frozen=True, slots=True)
class _Call:
    """One HTTP request while it is answered."""

    request: Request
    ticket: Ticket
    sender: Sender
    headers: dict[str, str]  # of the response


class Pooling:
    """The endpoints that pool hidden states."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._scoring = services.scoring

    async def embeddings(self, request: Request) -> Response:
        return await self._respond(request, "embeddings", EmbeddingRequest.read, self._embed)

    async def ollama_embed(self, request: Request) -> Response:
        return await self._respond(
            request, "embeddings", OllamaEmbedRequest.read_embedding, self._ollama_embed
        )

    async def ollama_embeddings(self, request: Request) -> Response:
        return await self._respond(
            request, "embeddings", OllamaEmbeddingsRequest.read_embedding, self._ollama_embeddings
        )

    async def score(self, request: Request) -> Response:
        return await self._respond(request, "score", ScoreRequest.read, self._score)

    async def rerank(self, request: Request) -> Response:
        return await self._respond(request, "rerank", RerankRequest.read, self._rerank)

    async def _respond(
        self,
        request: Request,
        operation: str,
        read: Callable[[bytes], B],
        answer: Callable[[B, _Call], Any],
    ) -> Response:
        services = self._services
        ticket = services.desk.open_ticket(request)
        with ended_on_error(ticket):
            services.desk.check_open()
            sender = services.keys.sender_of(request)
            ticket.summary.tenant = sender.tenant.name
            body = await read_as(request, lambda raw: read(ticket.keep_request(raw)), services)
            ticket.mark("receive")
            ticket.summary.operation = operation
            ticket.summary.model = body.model or services.card.name
            ticket.summary.adapter = services.preparer.adapter_of(body.model, sender.tenant)
            if body.include_cost and services.costs is None:
                raise RequestError(
                    "include_cost needs a server started with --price-per-hour.", "include_cost"
                )
            call = _Call(request, ticket, sender, headers=unknown_fields_header(request))
            content = await cancel_on_disconnect(request.receive, answer(body, call))
        ticket.keep_response(content)
        ticket.end("success", reason="stop")
        return Response(content, media_type="application/json", headers=call.headers)

    # ---- the endpoints -----------------------------------------------------------------------

    async def _embed(self, body: EmbeddingRequest, call: _Call) -> bytes:
        pooled = await self._vectors(body, call)
        is_base64 = body.encoding_format == "base64"
        return await self._off_loop(
            pooled.num_numbers > _INLINE_NUMBERS, _embeddings_json, pooled, is_base64
        )

    async def _ollama_embed(self, body: EmbeddingRequest, call: _Call) -> bytes:
        began = time.monotonic()
        pooled = await self._vectors(body, call)
        seconds = time.monotonic() - began
        return await self._off_loop(
            pooled.num_numbers > _INLINE_NUMBERS, _ollama_json, pooled, seconds
        )

    async def _ollama_embeddings(self, body: EmbeddingRequest, call: _Call) -> bytes:
        (vector,) = (await self._vectors(body, call)).vectors
        return msgspec.json.encode({"embedding": array("f", vector).tolist()})

    async def _vectors(self, body: EmbeddingRequest, call: _Call) -> _Pooled:
        pooling, prompts = self._services.card.pooling, as_prompts(body.input)
        pooling.check("embed")
        activation = body.normalize if body.use_activation is None else body.use_activation
        params = pooling.params(body.dimensions, activation)
        size = params.dimensions or pooling.size
        _check_count("input", len(prompts), size)
        if body.truncate_prompt_tokens is not None:
            prompts = self._builder.last_chars(prompts)
        num_chars = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        encoded = await self._encode(
            num_chars, self._builder.encode_prompts, prompts, body.add_special_tokens
        )
        return await self._pool("embd", body, encoded, params, call)

    async def _score(self, body: ScoreRequest, call: _Call) -> bytes:
        pairs = as_pairs(body.text_1, body.text_2)
        fields = "text_1", "text_2"
        pooled, scores = await self._scores("score", body, pairs, fields=fields, call=call)
        data = [
            {"object": "score", "index": index, "score": score}
            for index, score in enumerate(scores)
        ]
        return msgspec.json.encode(pooled.head(object="list", data=data, usage=pooled.usage))

    async def _rerank(self, body: RerankRequest, call: _Call) -> bytes:
        if not body.documents:
            raise RequestError("documents is empty; send at least one.", "documents")
        pairs = as_pairs(body.query, body.documents)
        fields = "query", "documents"
        pooled, scores = await self._scores("rerank", body, pairs, fields=fields, call=call)
        ranked = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = []
        for index in ranked[: body.top_n or None]:
            document = {"document": {"text": body.documents[index]}}
            results.append(
                {"index": index, "relevance_score": scores[index]}
                | (document if body.return_documents else {})
            )
        return msgspec.json.encode(pooled.head(results=results, usage=pooled.usage))

    async def _scores(
        self,
        prefix: str,
        body: PoolingRequest,
        pairs: list[Pair],
        *,
        fields: tuple[str, str],
        call: _Call,
    ) -> tuple[_Pooled, list[float]]:
        """Score pairs; `fields` of the client have their first and second texts."""
        self._scoring.check()
        pooling = self._services.card.pooling
        _check_count(fields[1], len(pairs), pooling.size)
        num_chars = sum(len(text) for pair in pairs for text in pair)
        # Cosines have no activation function behind them.
        activation = body.use_activation if self._scoring.reads_pairs else None
        params = pooling.params(use_activation=activation)
        with _naming(fields, pairs):
            prompts = await self._encode(num_chars, self._scoring.prompts, pairs, self._builder)
            pooled = await self._pool(prefix, body, prompts, params, call)
        scores = await self._off_loop(
            len(pairs) * pooling.size > _INLINE_NUMBERS, self._scoring.scores, pairs, pooled.vectors
        )
        return pooled, scores

    # ---- the engine --------------------------------------------------------------------------

    @property
    def _builder(self) -> RequestBuilder:
        return RequestBuilder(self._services.card, self._services.client.report)

    async def _encode(self, num_chars: int, encode: Callable[..., T], *args: Any) -> T:
        return await self._off_loop(num_chars > _INLINE_CHARS, encode, *args)

    async def _off_loop(self, in_thread: bool, work: Callable[..., T], *args: Any) -> T:
        if not in_thread:
            return work(*args)
        return await self._services.workers.releasing_gil(work, *args)

    async def _pool(
        self,
        prefix: str,
        body: PoolingRequest,
        prompts: Sequence[EncodedPrompt],
        params: PoolingParams,
        call: _Call,
    ) -> _Pooled:
        """Compute the vectors of prompts, in their order."""
        services, builder, unique = self._services, self._builder, uuid.uuid4().hex
        response_id = f"{prefix}-{body.request_id or unique}"
        call.request.state.response_id = call.ticket.summary.response_id = response_id
        call.ticket.mark("tokenize")
        call.headers.update(request_id_header(call.request, response_id, services.config))
        adapter, tenant = services.preparer.adapter_of(body.model), call.sender.tenant
        is_batch = BATCH_OWNER in call.request.scope
        options = RequestOptions(
            adapter=adapter,
            priority=tenant.priority(BATCH_PRIORITY if is_batch else body.priority),
            cache_salt=self._salt(body, tenant),
            tenant=tenant.name,
            weight=tenant.weight,
        )
        fitted = [builder.fit_pooled(prompt, body.truncate_prompt_tokens) for prompt in prompts]
        num_prompt = sum(len(prompt.tokens) for prompt in fitted)
        call.ticket.summary.num_prompt = num_prompt
        requests = builder.pooling_requests(f"{response_id}-{unique}", fitted, params, options)
        groups = list(_groups(requests, max(1, services.client.max_num_seqs // _NUM_LANES)))
        first = [request for group in groups[:_NUM_LANES] for request in group]
        services.admission.check(len(first), sum(len(request.prompt) for request in first))
        if tenant.is_limited:
            hold = await services.limits.admit(tenant, num_prompt)
            call.ticket.on_end = hold.release
            call.headers.update(hold.headers)
        entry = Entry(
            response_id=response_id,
            owner=tenant.name,
            key_id=call.sender.key_id,
            began=call.ticket.began,
            request_ids=tuple(request.request_id for request in requests),
            path=call.ticket.path,
            adapter=adapter,
        )
        call.ticket.entry = entry
        services.traces.open(entry)
        try:
            outputs = await self._run(groups, call.ticket.began)
        except BaseException:
            services.traces.mark_lost(entry)  # some requests may never have been sent
            raise
        timelines = [output.timeline for output in outputs if output.timeline is not None]
        num_cached = sum(each.num_cached for each in timelines)
        call.ticket.summary.num_cached = num_cached
        usage: Json = {
            "prompt_tokens": num_prompt,
            "completion_tokens": 0,
            "total_tokens": num_prompt,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }
        if body.include_cost:
            usage |= await self._cost(entry)
        vectors = [output.pooled for output in outputs if output.pooled is not None]
        assert len(vectors) == len(prompts)
        return _Pooled(response_id, adapter or services.card.name, vectors, usage)

    def _salt(self, body: PoolingRequest, tenant: Tenant) -> str:
        services = self._services
        if services.keys.are_needed and not services.config.share_prefix_cache:
            return tenant.cache_salt(body.cache_salt)
        return body.cache_salt or ""

    async def _run(self, groups: list[list[NewRequest]], began: float) -> list[Output]:
        """Send the groups to the engine, some at a time; returns their outputs in order."""
        client, metrics = self._services.client, self._services.metrics
        tenant = groups[0][0].tenant
        outputs: dict[str, Output] = {}
        left = iter(groups)

        async def lane() -> None:
            for group in left:
                inbox = client.submit(group)
                try:
                    while (output := await client.next(inbox)) is not None:
                        outputs[output.request_id] = output
                        seconds = time.monotonic() - began
                        if output.timeline is not None:
                            metrics.first_token(seconds, output.timeline, tenant)
                        metrics.finished(
                            output.finish or "stop",
                            num_tokens=0,
                            decode_s=0.0,
                            total_s=seconds,
                            tenant=tenant,
                            timeline=output.timeline,
                        )
                finally:
                    client.drop(inbox)

        lanes = [asyncio.create_task(lane()) for _ in range(_NUM_LANES)]
        try:
            await asyncio.gather(*lanes)
        finally:
            for task in lanes:
                task.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)
        return [outputs[request.request_id] for group in groups for request in group]

    async def _cost(self, entry: Entry) -> Json:
        costs, traces = self._services.costs, await self._services.traces.wait_closed(entry)
        if costs is None or traces is None:
            return {}
        cost = costs.price.of(traces)
        return {"cost": cost.total, "cost_details": cost_json(cost)}


@contextmanager
def _naming(fields: tuple[str, str], pairs: Sequence[Pair]) -> Iterator[None]:
    """Let errors about the prompts of pairs name the client's field with the longest text."""
    try:
        yield
    except RequestError as error:
        if error.param in _PROMPT_FIELDS:
            first, second = (max(map(len, texts)) for texts in zip(*pairs, strict=True))
            error.param = fields[first <= second]
        raise


def _check_count(param: str, count: int, size: int) -> None:
    if not count:
        raise RequestError(f"{param} is empty; send at least one.", param)
    if count > limits.MAX_INPUTS:
        raise RequestError(
            f"{param} has {count:,} items; at most {limits.MAX_INPUTS:,} are accepted.", param
        )
    if count * size > limits.MAX_TOTAL_NUMBERS:
        raise RequestError(
            f"{count:,} vectors of {size:,} numbers are {count * size:,} numbers in one answer; at most "
            f"{limits.MAX_TOTAL_NUMBERS:,} are sent. Send fewer at a time.",
            param,
        )


def _groups(requests: Sequence[NewRequest], max_count: int) -> Iterator[list[NewRequest]]:
    """Cut requests into groups of bounded count and tokens."""
    group: list[NewRequest] = []
    num_tokens = 0
    for request in requests:
        num_tokens += len(request.prompt)
        if group and (len(group) == max_count or num_tokens > _GROUP_TOKENS):
            yield group
            group, num_tokens = [], len(request.prompt)
        group.append(request)
    if group:
        yield group


def _embeddings_json(pooled: _Pooled, is_base64: bool) -> bytes:
    """The response's body. Vectors are encoded one by one: all in one call would hold the GIL."""
    data = []
    for index, vector in enumerate(pooled.vectors):
        numbers: str | list[float]
        numbers = base64.b64encode(vector).decode() if is_base64 else array("f", vector).tolist()
        item = {"object": "embedding", "index": index, "embedding": numbers}
        data.append(msgspec.Raw(msgspec.json.encode(item)))
    return msgspec.json.encode(pooled.head(object="list", data=data, usage=pooled.usage))


def _ollama_json(pooled: _Pooled, seconds: float) -> bytes:
    """The body of /api/embed."""
    vectors = [
        msgspec.Raw(msgspec.json.encode(array("f", vector).tolist())) for vector in pooled.vectors
    ]
    return msgspec.json.encode(
        {
            "model": pooled.model,
            "embeddings": vectors,
            "total_duration": round(seconds * 1e9),
            "load_duration": 0,
            "prompt_eval_count": pooled.usage["prompt_tokens"],
        }
    )
