"""The OpenAPI description of the server: paths from the router, schemas from the protocol's types."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel, Field, create_model
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from windlass.serve.anthropic_api import CountedRequest, MessagesRequest
from windlass.serve.api_response_types import (
    BatchList,
    BatchObject,
    CreatedMessage,
    DeletedFile,
    DeletedResponse,
    FileList,
    OllamaChat,
    OllamaModels,
    OllamaShown,
    OllamaText,
    OllamaVector,
    OllamaVectors,
    ResponseObject,
    ServerVersion,
    StoredFile,
    TokenCount,
)
from windlass.serve.batch.routes import CreateBatchRequest
from windlass.serve.config_admin import config_hints
from windlass.serve.llama_api import (
    LlamaCompletionRequest,
    LlamaInfillRequest,
    LlamaTokenizeRequest,
)
from windlass.serve.ollama_api import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from windlass.serve.pooling_api import EmbeddingRequest, RerankRequest, ScoreRequest
from windlass.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    LoadPrefixRequest,
    SaveChatPrefixRequest,
    SavePrefixRequest,
    SleepRequest,
    TokenizeChatRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
    WakeRequest,
)
from windlass.serve.response_types import (
    ChatCompletion,
    EmbeddingList,
    Model,
    ModelList,
    Ranking,
    ScoreList,
    TextCompletion,
)
from windlass.serve.responses_api import ResponsesRequest
from windlass.version import __version__

Json = dict[str, Any]
Bodies = tuple[type[BaseModel], ...]

# The checks of values are those of config.py.
ConfigPatch: type[BaseModel] = create_model(  # type: ignore[call-overload]
    "ConfigPatch",
    version=(int | None, Field(None, description="Refuse the change if the config is another.")),
    **{
        name: (hint, Field(None, description=help)) for name, (hint, help) in config_hints().items()
    },
)

_REF = "#/components/schemas/{model}"
_JSON = "application/json"
_EVENTS = "text/event-stream"
_LINES = "application/x-ndjson"
_BYTES = "application/octet-stream"
_TEXT = "text/plain"

_OPENAI, _ANTHROPIC, _OLLAMA, _LLAMA = "OpenAI", "Anthropic", "Ollama", "llama-server"
_TOKENS, _BATCHES, _RANKING = "Tokens", "Files and batches", "Ranking"
_OPERATIONS_TAG, _ADMIN = "Operations", "Administration"


@dataclass(frozen=True, slots=True)
class Operation:
    """What the router does not know of an endpoint. `bodies`: a request has one of these types."""

    tag: str
    summary: str
    bodies: Bodies = ()
    media: tuple[str, ...] = (_JSON,)
    query: Mapping[str, Json] | None = None
    form: Json | None = None  # the schema of multipart/form-data
    optional_body: bool = False
    error: str | None = None  # the schema of an error; None: that of the tag
    result: type[BaseModel] | None = None  # the type of a JSON response; None: any object


_LIMIT: Json = {"type": "integer", "minimum": 1}
_AFTER: Json = {"type": "string", "description": "The id of the last object of the page before."}
_PAGE = {"after": _AFTER, "limit": _LIMIT}
_UPLOAD: Json = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
}
_SLEEP = Operation(
    _ADMIN, "Release memory until the server is woken", (SleepRequest,), optional_body=True
)
_WAKE = Operation(_ADMIN, "Wake the server", (WakeRequest,), optional_body=True)
_RESET = Operation(_ADMIN, "Empty the prefix cache of unused blocks")
_SCORE = Operation(_RANKING, "Score pairs of texts", (ScoreRequest,), result=ScoreList)
_RERANK = Operation(_RANKING, "Order documents by a query", (RerankRequest,), result=Ranking)
_READY = Operation(
    _OPERATIONS_TAG, "Whether the server would answer a request", error="Unavailable"
)

_TIME: Json = {"type": "string", "description": "Seconds since 1970, or a date of UTC."}
_USAGE_QUERY: dict[str, Json] = {
    "since": _TIME,
    "until": _TIME,
    "bucket": {"type": "string", "enum": ["hour", "day", "month"]},
    "format": {"type": "string", "enum": ["json", "csv"]},
}

_LLAMA_COMPLETION = Operation(
    _LLAMA, "Complete a text", (LlamaCompletionRequest,), (_JSON, _EVENTS)
)

# By method and path. A route that is missing here is described by its path alone.
_OPERATIONS = {
    "POST /v1/chat/completions": Operation(
        _OPENAI,
        "Answer a conversation",
        (ChatRequest,),
        (_JSON, _EVENTS),
        result=ChatCompletion,
    ),
    "POST /v1/completions": Operation(
        _OPENAI, "Complete a text", (CompletionRequest,), (_JSON, _EVENTS), result=TextCompletion
    ),
    "POST /v1/responses": Operation(
        _OPENAI, "Create a response", (ResponsesRequest,), (_JSON, _EVENTS), result=ResponseObject
    ),
    "GET /v1/responses/{response_id}": Operation(
        _OPENAI, "Read a stored response", result=ResponseObject
    ),
    "DELETE /v1/responses/{response_id}": Operation(
        _OPENAI, "Delete a stored response", result=DeletedResponse
    ),
    "POST /v1/embeddings": Operation(
        _OPENAI, "Embed texts", (EmbeddingRequest,), result=EmbeddingList
    ),
    "POST /v1/score": _SCORE,
    "POST /score": _SCORE,
    "POST /v1/rerank": _RERANK,
    "POST /v2/rerank": _RERANK,
    "POST /rerank": _RERANK,
    "GET /v1/models": Operation(_OPENAI, "List the model and its adapters", result=ModelList),
    "GET /v1/models/{name}": Operation(_OPENAI, "Describe the model or an adapter", result=Model),
    "POST /v1/messages": Operation(
        _ANTHROPIC,
        "Create a message",
        (MessagesRequest,),
        (_JSON, _EVENTS),
        result=CreatedMessage,
    ),
    "POST /v1/messages/count_tokens": Operation(
        _ANTHROPIC, "Count the tokens of a message", (CountedRequest,), result=TokenCount
    ),
    "POST /api/chat": Operation(
        _OLLAMA, "Answer a conversation", (OllamaChatRequest,), (_JSON, _LINES), result=OllamaChat
    ),
    "POST /api/generate": Operation(
        _OLLAMA, "Complete a text", (OllamaGenerateRequest,), (_JSON, _LINES), result=OllamaText
    ),
    "POST /api/embed": Operation(
        _OLLAMA, "Embed texts", (OllamaEmbedRequest,), result=OllamaVectors
    ),
    "POST /api/embeddings": Operation(
        _OLLAMA, "Embed a text", (OllamaEmbeddingsRequest,), result=OllamaVector
    ),
    "POST /api/show": Operation(
        _OLLAMA, "Describe a model", (OllamaShowRequest,), result=OllamaShown
    ),
    "GET /api/tags": Operation(_OLLAMA, "List the model and its adapters", result=OllamaModels),
    "GET /api/version": Operation(_OLLAMA, "The server's version", result=ServerVersion),
    "POST /v1/files": Operation(_BATCHES, "Upload a file", form=_UPLOAD, result=StoredFile),
    "GET /v1/files": Operation(
        _BATCHES,
        "List files",
        query={
            **_PAGE,
            "order": {"type": "string", "enum": ["asc", "desc"]},
            "purpose": {"type": "string"},
        },
        result=FileList,
    ),
    "GET /v1/files/{file_id}": Operation(_BATCHES, "Describe a file", result=StoredFile),
    "GET /v1/files/{file_id}/content": Operation(_BATCHES, "Read a file", media=(_BYTES,)),
    "DELETE /v1/files/{file_id}": Operation(_BATCHES, "Delete a file", result=DeletedFile),
    "POST /v1/batches": Operation(
        _BATCHES, "Start a batch", (CreateBatchRequest,), result=BatchObject
    ),
    "GET /v1/batches": Operation(_BATCHES, "List batches", query=_PAGE, result=BatchList),
    "GET /v1/batches/{batch_id}": Operation(_BATCHES, "Describe a batch", result=BatchObject),
    "POST /v1/batches/{batch_id}/cancel": Operation(_BATCHES, "Cancel a batch", result=BatchObject),
    "POST /tokenize": Operation(
        _TOKENS,
        "Tokenize a text or a conversation",
        (TokenizeRequest, TokenizeChatRequest, LlamaTokenizeRequest),
    ),
    "POST /detokenize": Operation(_TOKENS, "Decode tokens", (DetokenizeRequest,)),
    "POST /apply-template": Operation(
        _TOKENS, "Render a conversation with the chat template", (TokenizeChatRequest,)
    ),
    "POST /completion": _LLAMA_COMPLETION,
    "POST /completions": _LLAMA_COMPLETION,
    "POST /infill": Operation(
        _LLAMA, "Fill in the middle of a text", (LlamaInfillRequest,), (_JSON, _EVENTS)
    ),
    "GET /props": Operation(_LLAMA, "Settings of the server"),
    "GET /slots": Operation(
        _LLAMA, "The slots of the engine", query={"fail_on_no_slot": {"type": "integer"}}
    ),
    "GET /health": _READY,
    "GET /v1/health": _READY,
    "GET /health/ready": _READY,
    "GET /ping": _READY,
    "GET /health/live": Operation(
        _OPERATIONS_TAG, "Whether the engine has not failed for good", error="Unavailable"
    ),
    "GET /health/generate": Operation(_OPERATIONS_TAG, "Generate one token", error="Unavailable"),
    "GET /version": Operation(_OPERATIONS_TAG, "The server's version", result=ServerVersion),
    "GET /metrics": Operation(_OPERATIONS_TAG, "Metrics for Prometheus", media=(_TEXT,)),
    "GET /load": Operation(_OPERATIONS_TAG, "Requests in flight, running and queued"),
    "GET /memory": Operation(_OPERATIONS_TAG, "Memory by owner"),
    "GET /cost": Operation(_OPERATIONS_TAG, "The cost of a key, or of the server"),
    "GET /v1/requests/{response_id}/explain": Operation(
        _OPERATIONS_TAG, "Explain the latency of a request"
    ),
    "GET /is_sleeping": Operation(_OPERATIONS_TAG, "Whether the server sleeps"),
    "GET /admin/tenants": Operation(_ADMIN, "List the tenants of the keys file"),
    "PATCH /admin/tenants/{name}": Operation(_ADMIN, "Change fields of a tenant"),
    "GET /admin/usage": Operation(
        _ADMIN,
        "Usage of all tenants",
        media=(_JSON, "text/csv"),
        query={**_USAGE_QUERY, "tenant": {"type": "string"}},
    ),
    "GET /v1/usage": Operation(
        _OPERATIONS_TAG, "Usage of the key's tenant", media=(_JSON, "text/csv"), query=_USAGE_QUERY
    ),
    "POST /admin/sleep": _SLEEP,
    "POST /sleep": _SLEEP,
    "POST /admin/wake": _WAKE,
    "POST /wake_up": _WAKE,
    "POST /admin/reset_prefix_cache": _RESET,
    "POST /reset_prefix_cache": _RESET,
    "POST /admin/kv/save": Operation(
        _ADMIN, "Keep the KV blocks of a prefix", (SavePrefixRequest, SaveChatPrefixRequest)
    ),
    "POST /admin/kv/load": Operation(_ADMIN, "Load a saved prefix again", (LoadPrefixRequest,)),
    "GET /admin/kv": Operation(_ADMIN, "List the saved prefixes"),
    "DELETE /admin/kv/{name}": Operation(_ADMIN, "Delete a saved prefix"),
    "GET /admin/config": Operation(_ADMIN, "All settings, and which can change now"),
    "PATCH /admin/config": Operation(_ADMIN, "Change settings", (ConfigPatch,)),
    "GET /admin/config/history": Operation(_ADMIN, "The last changes of settings"),
    "POST /v1/load_lora_adapter": Operation(_ADMIN, "Load an adapter", (LoadAdapterRequest,)),
    "POST /v1/unload_lora_adapter": Operation(_ADMIN, "Unload an adapter", (UnloadAdapterRequest,)),
}

_NULLABLE = {"type": ["string", "null"]}


def _strings(**fields: Json) -> Json:
    """An object that has all these fields; {} is a string."""
    properties = {name: schema or {"type": "string"} for name, schema in fields.items()}
    return {"type": "object", "required": [*fields], "properties": properties}


_ERRORS = {
    "Error": _strings(error=_strings(message={}, type={}, param=_NULLABLE, code=_NULLABLE)),
    "AnthropicError": _strings(type={}, error=_strings(type={}, message={})),
    "OllamaError": _strings(error={}),
    "Unavailable": _strings(status={}, reason={}),
}
_ERROR_OF_TAG = {_ANTHROPIC: "AnthropicError", _OLLAMA: "OllamaError"}


def describe(routes: Iterable[APIRoute], root_path: str, *, needs_key: bool) -> Json:
    """The OpenAPI 3.1 document for the routes of a server."""
    paths: dict[str, Json] = {}
    types: set[tuple[type[BaseModel], JsonSchemaMode]] = set()
    for route in (each for each in routes if each.include_in_schema):
        path = re.sub(r":path\}", "}", route.path)
        if path == "/" or path.startswith("/console/"):
            continue  # the console is for browsers
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operation = _OPERATIONS.get(f"{method} {path}", Operation("Other", path))
            types.update((body, "validation") for body in operation.bodies)
            if operation.result is not None:
                types.add((operation.result, "serialization"))
            paths.setdefault(path, {})[method.lower()] = _operation(operation, method, path)
    _, schemas = models_json_schema(
        sorted(types, key=lambda each: each[0].__name__),
        ref_template=_REF,
    )
    components: Json = {"schemas": {**schemas.get("$defs", {}), **_ERRORS}}
    document: Json = {
        "openapi": "3.1.0",
        "info": {
            "title": "Windlass",
            "version": __version__,
            "description": "An LLM inference server with the APIs of OpenAI, Anthropic and Ollama.",
        },
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": components,
    }
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _operation(operation: Operation, method: str, path: str) -> Json:
    words = re.findall(r"\w+", path)
    error = operation.error or _ERROR_OF_TAG.get(operation.tag, "Error")
    described: Json = {
        "operationId": "_".join([method.lower(), *words]),
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": {
            "200": {
                "description": "Success.",
                "content": {media: _content(media, operation) for media in operation.media},
            },
            "default": {
                "description": "An error.",
                "content": {_JSON: {"schema": {"$ref": _REF.format(model=error)}}},
            },
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    parameters += [
        {"name": name, "in": "query", "schema": schema}
        for name, schema in (operation.query or {}).items()
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.form is not None:
        content = {"multipart/form-data": {"schema": operation.form}}
        described["requestBody"] = {"required": True, "content": content}
    elif operation.bodies:
        refs = [{"$ref": _REF.format(model=body.__name__)} for body in operation.bodies]
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        content = {_JSON: {"schema": schema}}
        described["requestBody"] = {"required": not operation.optional_body, "content": content}
    return described


def _content(media: str, operation: Operation) -> Json:
    schema: Json = {"type": "object"} if media == _JSON else {"type": "string"}
    if media == _JSON and operation.result is not None:
        schema = {"$ref": _REF.format(model=operation.result.__name__)}
    if media == _BYTES:
        schema["format"] = "binary"
    return {"schema": schema}
