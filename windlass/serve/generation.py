"""The endpoints that generate text, in the formats of several APIs.

An API reads its body into a chat or completion request, and formats the response; all between is
common to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from windlass.core.types import BATCH_PRIORITY
from windlass.errors import RequestError
from windlass.serve.anthropic_api import MessagesRequest
from windlass.serve.anthropic_format import AnthropicFormat
from windlass.serve.beam_response import BeamResponse
from windlass.serve.bodies import (
    deadline_s,
    names_unknown_fields,
    read_as,
    relaxed_header,
    reply,
    request_id_header,
    unknown_fields_header,
)
from windlass.serve.desk import Ticket
from windlass.serve.formatters import ChatFormatter, CompletionFormatter, Formatter, Json
from windlass.serve.keys import BATCH_OWNER
from windlass.serve.llama_api import LlamaCompletionRequest, LlamaInfillRequest
from windlass.serve.llama_format import LlamaFormat
from windlass.serve.ollama_api import OllamaChatRequest, OllamaGenerateRequest
from windlass.serve.ollama_format import OllamaFormat
from windlass.serve.openai_format import OpenAIFormat
from windlass.serve.prepare import Prepared
from windlass.serve.protocol import ChatRequest, CompletionRequest
from windlass.serve.response import CompletionResponse, ResponseFormat, ended_on_error
from windlass.serve.response_store import ResponseStore
from windlass.serve.responses_api import ResponsesRequest, messages_of
from windlass.serve.responses_format import ResponsesFormat
from windlass.serve.services import GenerationServices
from windlass.serve.tenants import Tenant

GenerationBody = ChatRequest | CompletionRequest
MakeFormat = Callable[[GenerationBody, Prepared], ResponseFormat]


@dataclass(frozen=True, slots=True)
class ApiCall:
    """A request of any API as a chat or a completion, and the format of its response."""

    body: GenerationBody
    make_format: MakeFormat
    unknown_fields: Sequence[RequestError]
    deadline_ms: float | None = None


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
        report = services.client.report
        text = await services.preparer.render(body, report)
        tokens = await services.preparer.encode(text, False, report)
        return reply({"input_tokens": len(tokens)})

    def _openai(self, body: GenerationBody) -> ApiCall:
        return ApiCall(body, self._openai_format, body.unknown_fields, body.deadline_ms)

    def _openai_format(self, body: GenerationBody, prepared: Prepared) -> ResponseFormat:
        services = self._services
        tokenizer = services.card.tokenizer
        formatter: Formatter
        if isinstance(body, ChatRequest):
            formatter = ChatFormatter(body, prepared, tokenizer)
        else:
            formatter = CompletionFormatter(body, prepared, tokenizer)
        return OpenAIFormat(
            formatter,
            body=body,
            response_id=prepared.response_id,
            model=self._model_of(prepared),
            force_usage=services.config.enable_force_include_usage or bool(body.include_cost),
        )

    def _responses(self, raw: bytes, owner: str) -> ApiCall:
        body = ResponsesRequest.read(raw)
        earlier: list[Json] = []
        if body.previous_response_id is not None:
            earlier = self._stored.get(body.previous_response_id, owner).messages

        def store(response: Json, items: list[Json]) -> None:
            messages = [*earlier, *body.messages(), *messages_of(items)]
            self._stored.add(response, messages, owner)

        def make_format(_: GenerationBody, prepared: Prepared) -> ResponseFormat:
            return ResponsesFormat(
                body,
                prepared,
                model=self._model_of(prepared),
                tokenizer=self._services.card.tokenizer,
                store=store,
            )

        chat = body.chat(earlier)
        return ApiCall(chat, make_format, body.unknown_fields, body.deadline_ms)

    def _owner(self, request: Request) -> str:
        return self._services.keys.tenant_of(request).name

    def _anthropic(self, raw: bytes, _owner: str) -> ApiCall:
        body = MessagesRequest.read(raw)

        def make_format(_: GenerationBody, prepared: Prepared) -> ResponseFormat:
            return AnthropicFormat(prepared, self._model_of(prepared))

        return ApiCall(body.chat(), make_format, body.unknown_fields, body.deadline_ms)

    def _ollama(self, raw: bytes, *, is_chat: bool) -> ApiCall:
        body: OllamaChatRequest | OllamaGenerateRequest
        request: GenerationBody
        if is_chat:
            body = OllamaChatRequest.read(raw)
            request = body.chat()
        else:
            body = OllamaGenerateRequest.read(raw)
            request = body.request()

        def make_format(_: GenerationBody, prepared: Prepared) -> ResponseFormat:
            return OllamaFormat(prepared, self._model_of(prepared), is_chat=is_chat)

        return ApiCall(request, make_format, body.unknown_fields, body.deadline_ms)

    def _llama(self, body: LlamaCompletionRequest | LlamaInfillRequest) -> ApiCall:
        card = self._services.card
        tokenizer = card.tokenizer

        def make_format(_: GenerationBody, prepared: Prepared) -> ResponseFormat:
            model = self._model_of(prepared)
            return LlamaFormat(body, prepared, model=model, tokenizer=tokenizer)

        request = body.request(card.default_sampling, tokenizer.encode)
        return ApiCall(request, make_format, body.unknown_fields, body.deadline_ms)

    def _model_of(self, prepared: Prepared) -> str:
        return prepared.requests[0].adapter or self._services.card.name

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
            body = body.model_copy(update=changes)
            allowed_s = deadline_s(request, call.deadline_ms)
            prepared = await self._prepare(body, tenant, ticket)
            if allowed_s is not None:
                prepared = prepared.due_at(ticket.began + allowed_s)
            request.state.response_id = prepared.response_id
            headers = request_id_header(request, prepared.response_id, services.config)
            headers |= unknown_fields_header(request)
            headers |= relaxed_header(request, prepared.relaxed)
            services.admission.check(body.num_completions, prepared.num_prompt_tokens)
            if tenant.is_limited:
                hold = await services.limits.admit(tenant, prepared.max_total_tokens)
                ticket.on_end = hold.release
                headers |= hold.headers
            services.metrics.params(prepared.sampling.n, prepared.sampling.max_tokens)
            if body.include_cost and services.price is None:
                raise RequestError(
                    "include_cost needs a server started with --price-per-hour.",
                    "include_cost",
                )
            response_format = call.make_format(body, prepared)
            if body.use_beam_search:
                beams = BeamResponse(
                    services,
                    prepared,
                    body=body,
                    response_format=response_format,
                    ticket=ticket,
                    sender=sender,
                )
                response = await beams.send_whole(request)
            else:
                completion = CompletionResponse(
                    services,
                    prepared,
                    body=body,
                    response_format=response_format,
                    ticket=ticket,
                    sender=sender,
                )
                send = completion.stream if body.stream else completion.send_whole
                response = await send(request)
        response.headers.update(headers)
        return response

    async def _prepare(self, body: GenerationBody, tenant: Tenant, ticket: Ticket) -> Prepared:
        preparer, report = self._services.preparer, self._services.client.report
        summary, is_chat = ticket.summary, isinstance(body, ChatRequest)
        summary.operation = "chat" if is_chat else "text_completion"
        summary.model = body.model or self._services.card.name
        summary.stream = bool(body.stream)
        if isinstance(body, ChatRequest):
            prepared = await preparer.chat(body, report, tenant, ticket.mark)
        else:
            prepared = await preparer.completion(body, report, tenant)
        ticket.mark("tokenize")
        sampling = prepared.sampling
        summary.response_id = prepared.response_id
        summary.adapter = prepared.requests[0].adapter
        summary.num_completions, summary.max_tokens = sampling.n, sampling.max_tokens
        summary.temperature, summary.top_p = sampling.temperature, sampling.top_p
        summary.num_prompt = sum(len(prompt.tokens) for prompt in prepared.prompts)
        return prepared
