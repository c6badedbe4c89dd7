"""The endpoints that generate text, in the formats of several APIs.

An API reads its body into a chat or completion request, and formats the response; all between is
common to them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.responses import Response

from windlass.core.card import ModelCard
from windlass.core.types import BATCH_PRIORITY
from windlass.errors import EngineError, RequestBlocked, RequestError
from windlass.serve import anthropic_format, responses_format
from windlass.serve.anthropic_api import MessagesRequest
from windlass.serve.anthropic_format import AnthropicFormat
from windlass.serve.beam_response import BeamResponse
from windlass.serve.bodies import (
    deadline_s,
    fallback_header,
    names_unknown_fields,
    read_as,
    relaxed_header,
    reply,
    request_id_header,
    unknown_fields_header,
)
from windlass.serve.desk import Ticket
from windlass.serve.fallback import (
    FallbackMode,
    FallbackStep,
    first_step,
    may_go_on,
    mode_of,
    next_steps,
    reason_of,
)
from windlass.serve.formatters import ChatFormatter, CompletionFormatter, Formatter, Json
from windlass.serve.generation_services import Fallbacks, FallbackTier, GenerationServices
from windlass.serve.keys import BATCH_OWNER, Sender
from windlass.serve.llama_api import LlamaCompletionRequest, LlamaInfillRequest
from windlass.serve.llama_format import LlamaFormat
from windlass.serve.ollama_api import OllamaChatRequest, OllamaGenerateRequest
from windlass.serve.ollama_format import OllamaFormat
from windlass.serve.openai_format import OpenAIFormat
from windlass.serve.prepare import Prepared, as_prompts
from windlass.serve.protocol import ChatRequest, CompletionRequest, DeadlineField
from windlass.serve.response import CompletionResponse, ResponseFormat, ended_on_error
from windlass.serve.response_store import ResponseStore
from windlass.serve.responses_api import ResponsesRequest, messages_of
from windlass.serve.responses_format import ResponsesFormat

GenerationBody = ChatRequest | CompletionRequest
MakeFormat = Callable[[GenerationBody, Prepared, ModelCard], ResponseFormat]


@dataclass(frozen=True, slots=True)
class ApiCall:
    """A request of any API as a chat or a completion, and the format of its response."""

    body: GenerationBody
    make_format: MakeFormat
    unknown_fields: Sequence[RequestError]
    options: DeadlineField  # of the body that was sent
    id_prefix: str | None = None  # of the response's id; None: OpenAI's


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A request whose body was read, until it is answered."""

    request: Request
    body: GenerationBody
    make_format: MakeFormat
    ticket: Ticket
    sender: Sender
    allowed_s: float | None  # from its arrival to its deadline
    id_prefix: str | None = None
    content: bytes | None = None  # identifies it to all models; None: one model may answer

    def degraded(self, tier: FallbackTier | None) -> Exchange:
        """The same for a step of the chain of --fallback; None: for the server's own model."""
        if tier is None:
            return self
        changes: dict[str, object] = {}
        if tier.services is not None:
            changes["model"] = None  # its name belongs to the server's own model
        if tier.step.max_tokens is not None:
            names = ("max_tokens", "max_completion_tokens")
            given = [getattr(self.body, name, None) for name in names]
            shortest = min([tier.step.max_tokens, *(each for each in given if each is not None)])
            changes["max_tokens"] = shortest
            if isinstance(self.body, ChatRequest):
                changes["max_completion_tokens"] = shortest
        return replace(self, body=self.body.model_copy(update=changes))

    def is_late(self, now: float) -> bool:
        return self.allowed_s is not None and now >= self.ticket.began + self.allowed_s


class Generation:
    """The endpoints of the APIs of OpenAI, Anthropic and Ollama that generate text."""

    def __init__(self, services: GenerationServices) -> None:
        self._services = services
        self._stored = ResponseStore()

    async def chat(self, request: Request) -> Response:
        return await self._respond(request, lambda raw, _: self._openai(ChatRequest.read(raw)))

    async def completion(self, request: Request) -> Response:
        return await self._respond(
            request, lambda raw, _: self._openai(CompletionRequest.read(raw))
        )

    async def messages(self, request: Request) -> Response:
        return await self._respond(request, self._anthropic)

    async def ollama_chat(self, request: Request) -> Response:
        return await self._respond(request, lambda raw, _: self._ollama(raw, is_chat=True))

    async def ollama_generate(self, request: Request) -> Response:
        return await self._respond(request, lambda raw, _: self._ollama(raw, is_chat=False))

    async def llama_completion(self, request: Request) -> Response:
        return await self._respond(
            request, lambda raw, _: self._llama(LlamaCompletionRequest.read(raw))
        )

    async def llama_infill(self, request: Request) -> Response:
        return await self._respond(
            request, lambda raw, _: self._llama(LlamaInfillRequest.read(raw))
        )

    async def response(self, request: Request) -> Response:
        return await self._respond(request, self._responses)

    async def stored_response(self, request: Request, response_id: str) -> Response:
        return reply(self._stored.get(response_id, self._owner(request)).response)

    async def delete_response(self, request: Request, response_id: str) -> Response:
        self._stored.delete(response_id, self._owner(request))
        return reply({"id": response_id, "object": "response", "deleted": True})

    @names_unknown_fields
    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens"""
        services = self._services
        body = await read_as(request, MessagesRequest.read_to_count, services)
        services.preparer.adapter_of(body.model, services.keys.tenant_of(request))
        report = services.client.report
        text = await services.preparer.render(body, report)
        tokens = await services.preparer.encode(text, False, report)
        return reply({"input_tokens": len(tokens)})

    def _openai(self, body: GenerationBody) -> ApiCall:
        return ApiCall(body, self._openai_format, body.unknown_fields, body)

    def _openai_format(
        self, body: GenerationBody, prepared: Prepared, card: ModelCard
    ) -> ResponseFormat:
        tokenizer = card.tokenizer
        formatter: Formatter
        if isinstance(body, ChatRequest):
            formatter = ChatFormatter(body, prepared, tokenizer)
        else:
            formatter = CompletionFormatter(body, prepared, tokenizer)
        return OpenAIFormat(
            formatter,
            body=body,
            response_id=prepared.response_id,
            model=_model_of(prepared, card),
            force_usage=self._services.config.enable_force_include_usage or bool(body.include_cost),
        )

    def _responses(self, raw: bytes, owner: str) -> ApiCall:
        body = ResponsesRequest.read(raw)
        earlier: list[Json] = []
        if body.previous_response_id is not None:
            earlier = self._stored.get(body.previous_response_id, owner).messages

        def store(response: Json, items: list[Json]) -> None:
            messages = [*earlier, *body.messages(), *messages_of(items)]
            self._stored.add(response, messages, owner)

        def make_format(_: GenerationBody, prepared: Prepared, card: ModelCard) -> ResponseFormat:
            return ResponsesFormat(
                body,
                prepared,
                model=_model_of(prepared, card),
                tokenizer=card.tokenizer,
                store=store,
            )

        chat = body.chat(earlier)
        return ApiCall(chat, make_format, body.unknown_fields, body, responses_format.ID_PREFIX)

    def _owner(self, request: Request) -> str:
        return self._services.keys.tenant_of(request).name

    def _anthropic(self, raw: bytes, _owner: str) -> ApiCall:
        body = MessagesRequest.read(raw)

        def make_format(_: GenerationBody, prepared: Prepared, card: ModelCard) -> ResponseFormat:
            return AnthropicFormat(prepared, _model_of(prepared, card))

        prefix = anthropic_format.ID_PREFIX
        return ApiCall(body.chat(), make_format, body.unknown_fields, body, prefix)

    def _ollama(self, raw: bytes, *, is_chat: bool) -> ApiCall:
        body: OllamaChatRequest | OllamaGenerateRequest
        request: GenerationBody
        if is_chat:
            body = OllamaChatRequest.read(raw)
            request = body.chat()
        else:
            body = OllamaGenerateRequest.read(raw)
            request = body.request()

        def make_format(_: GenerationBody, prepared: Prepared, card: ModelCard) -> ResponseFormat:
            return OllamaFormat(prepared, _model_of(prepared, card), is_chat=is_chat)

        return ApiCall(request, make_format, body.unknown_fields, body)

    def _llama(self, body: LlamaCompletionRequest | LlamaInfillRequest) -> ApiCall:
        own = self._services.card

        def make_format(_: GenerationBody, prepared: Prepared, card: ModelCard) -> ResponseFormat:
            model = _model_of(prepared, card)
            return LlamaFormat(body, prepared, model=model, tokenizer=card.tokenizer)

        request = body.request(own.default_sampling, own.tokenizer.encode)
        return ApiCall(request, make_format, body.unknown_fields, body)

    async def _respond(self, request: Request, read: Callable[[bytes, str], ApiCall]) -> Response:
        """Every exit from here, and from the stream that it may return, ends the ticket."""
        services = self._services
        ticket = services.desk.open_ticket(request)
        with ended_on_error(ticket):
            services.desk.check_open()
            sender = services.keys.sender_of(request)
            tenant = sender.tenant
            ticket.summary.tenant = tenant.name
            call = await read_as(
                request, lambda raw: read(ticket.keep_request(raw), tenant.name), services
            )
            body = call.body
            ticket.mark("receive")
            services.admission.check_possible(body.num_completions)
            is_batch = BATCH_OWNER in request.scope
            priority = tenant.priority(BATCH_PRIORITY if is_batch else body.priority)
            changes: dict[str, object] = {"priority": priority}
            if services.keys.are_needed and not services.config.share_prefix_cache:
                # A tenant must not learn from timing what another tenant has sent.
                changes["cache_salt"] = tenant.cache_salt(body.cache_salt)
            exchange = Exchange(
                request=request,
                body=_changed(body, changes),
                make_format=call.make_format,
                ticket=ticket,
                sender=sender,
                allowed_s=deadline_s(request, call.options.deadline_ms),
                id_prefix=call.id_prefix,
            )
            if services.fallbacks is not None or services.shares_strikes:
                exchange = replace(exchange, content=body.content())
            if services.fallbacks is None:
                return await self._answer(exchange, services)
            asked = call.options.fallback, fallback_header(request)
            mode = mode_of(tenant.fallback, *asked, is_batch=is_batch)
            return await self._answer_with(services.fallbacks, exchange, mode)

    async def _answer_with(
        self, fallbacks: Fallbacks, exchange: Exchange, mode: FallbackMode | None
    ) -> Response:
        """Answer with the first step of the chain that can.

        If none can, raises the error of the server's own model, or of the first step if it was not
        tried.
        """
        services, ticket = self._services, exchange.ticket
        steps = self._usable_steps(fallbacks, exchange, mode)
        num_requests = exchange.body.num_completions
        index, reason = first_step(
            steps,
            await fallbacks.forecast(num_requests),
            allowed_s=exchange.allowed_s,
            limit_s=services.config.fallback_wait_ms / 1000 if mode == "auto" else None,
        )
        errors: dict[int, EngineError] = {}
        for step in [index, *next_steps(steps, index)]:
            summary, tier = ticket.summary, fallbacks.tiers[step - 1] if step else None
            chosen = services if tier is None else tier.services or services
            summary.fallback, summary.fallback_model = "", ""
            if tier is not None:
                summary.fallback = reason or ""
                summary.fallback_model = "" if chosen is services else chosen.card.name
            try:
                response = await self._answer(exchange.degraded(tier), chosen)
            except RequestBlocked:
                raise  # it has ended two engines
            except EngineError as error:
                errors[step] = error
                if not may_go_on(error, step) or exchange.is_late(time.monotonic()):
                    break
                reason = reason_of(error) or reason
                continue
            if tier is not None:
                services.metrics.fell_back(summary.fallback, chosen.card.name)
                response.headers["X-Windlass-Fallback"] = summary.fallback
            return response
        raise errors.get(0, next(iter(errors.values())))

    def _usable_steps(
        self, fallbacks: Fallbacks, exchange: Exchange, mode: FallbackMode | None
    ) -> list[FallbackStep | None]:
        """The chain with None for the steps that this request may not use, beginning with its own model."""
        own, body, tenant = self._services, exchange.body, exchange.sender.tenant
        adapter = own.preparer.adapter_of(body.model, tenant)  # raises ModelNotFound
        needs_own = bool(adapter) or _has_token_ids(body)
        steps: list[FallbackStep | None] = [None]
        for tier in fallbacks.tiers:
            other = tier.services
            is_usable = mode != "none" and (
                other is None
                or (not needs_own and tenant.may_use("", (other.card.name, *other.card.aliases)))
            )
            steps.append(tier.step if is_usable else None)
        return steps

    async def _answer(self, exchange: Exchange, services: GenerationServices) -> Response:
        """Answer with the model of `services`."""
        request, body, ticket = exchange.request, exchange.body, exchange.ticket
        tenant = exchange.sender.tenant
        prepared = await self._prepare(exchange, services)
        if exchange.allowed_s is not None:
            prepared = prepared.due_at(ticket.began + exchange.allowed_s)
        if exchange.content is not None:
            prepared = prepared.with_content(exchange.content)
        request.state.response_id = prepared.response_id
        headers = request_id_header(request, prepared.response_id, services.config)
        headers |= unknown_fields_header(request)
        headers |= relaxed_header(request, prepared.relaxed)
        services.admission.check(body.num_completions, prepared.num_prompt_tokens)
        if tenant.is_limited:
            headers |= await self._hold(exchange, prepared.max_total_tokens)
        services.metrics.params(prepared.sampling.n, prepared.sampling.max_tokens)
        if body.include_cost and services.price is None:
            raise RequestError(
                "include_cost needs a server started with --price-per-hour.", "include_cost"
            )
        respond = BeamResponse if body.use_beam_search else CompletionResponse
        completion = respond(
            services,
            prepared,
            body=body,
            response_format=exchange.make_format(body, prepared, services.card),
            ticket=ticket,
            sender=exchange.sender,
        )
        if body.stream and isinstance(completion, CompletionResponse):
            response = await completion.stream(request)
        else:
            response = await completion.send_whole(request)
        response.headers.update(headers)
        return response

    async def _hold(self, exchange: Exchange, max_tokens: int) -> dict[str, str]:
        """Count the request with the limits of its tenant, once; returns headers."""
        ticket, tenant = exchange.ticket, exchange.sender.tenant
        if ticket.limit_headers is None:
            hold = await self._services.limits.admit(tenant, max_tokens)
            ticket.on_end, ticket.limit_headers = hold.release, dict(hold.headers)
        return ticket.limit_headers

    async def _prepare(self, exchange: Exchange, services: GenerationServices) -> Prepared:
        body, tenant, ticket = exchange.body, exchange.sender.tenant, exchange.ticket
        preparer, report = services.preparer, services.client.report
        summary, is_chat = ticket.summary, isinstance(body, ChatRequest)
        summary.operation = "chat" if is_chat else "text_completion"
        summary.model = summary.model or body.model or services.card.name
        summary.stream = bool(body.stream)
        if isinstance(body, ChatRequest):
            prepared = await preparer.chat(body, report, tenant, ticket.mark)
        else:
            prepared = await preparer.completion(body, report, tenant)
        if exchange.id_prefix is not None:
            prepared = prepared.with_id_prefix(exchange.id_prefix)
        ticket.mark("tokenize")
        sampling = prepared.sampling
        summary.response_id = prepared.response_id
        summary.adapter = prepared.requests[0].adapter
        summary.num_completions, summary.max_tokens = sampling.n, sampling.max_tokens
        summary.temperature, summary.top_p = sampling.temperature, sampling.top_p
        summary.num_prompt = sum(len(prompt.tokens) for prompt in prepared.prompts)
        return prepared


def _changed(body: GenerationBody, changes: Mapping[str, object]) -> GenerationBody:
    """The body with these fields; itself if it has them already. An empty value is as good as none."""
    if all((getattr(body, name) or None) == (value or None) for name, value in changes.items()):
        return body
    return body.model_copy(update=changes)


def _model_of(prepared: Prepared, card: ModelCard) -> str:
    return prepared.requests[0].adapter or card.name


def _has_token_ids(body: GenerationBody) -> bool:
    """Whether a request has token ids, which mean something else to another model."""
    if body.logit_bias or body.allowed_token_ids or body.stop_token_ids:
        return True
    return isinstance(body, CompletionRequest) and any(
        not isinstance(prompt, str) for prompt in as_prompts(body.prompt)
    )
