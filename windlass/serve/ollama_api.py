"""The request bodies of Ollama's API, and their conversion to chats and completions."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from pydantic import Field

from windlass.errors import RequestError
from windlass.serve import body_limits as limits
from windlass.serve.abbreviate import abbreviate
from windlass.serve.pooling_api import EmbeddingRequest, Texts
from windlass.serve.protocol import Body, ChatRequest, CompletionRequest, DeadlineField

Json = dict[str, Any]

_LATEST = ":latest"
# Ollama's options, and our names. Those that set the engine up have no effect on a running one.
_OPTIONS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
_ENGINE_OPTIONS = frozenset(
    {
        "num_ctx",
        "num_batch",
        "num_gpu",
        "num_keep",
        "num_thread",
        "main_gpu",
        "low_vram",
        "numa",
        "use_mmap",
        "use_mlock",
        "repeat_last_n",
    }
)


def model_name(name: str | None) -> str | None:
    """The model's name without Ollama's default tag."""
    return None if name is None else name.removesuffix(_LATEST)


class OllamaRequest(Body, DeadlineField):
    """Fields of both endpoints. They stream by default."""

    stream: bool = True
    format: str | Json | None = None
    options: Json | None = None
    think: bool | str | None = None
    keep_alive: Any = None

    def common(self) -> Json:
        """The fields of the converted request that do not depend on the endpoint."""
        fields: Json = {"model": model_name(self.model), "stream": self.stream}
        for name, value in (self.options or {}).items():
            if name in _OPTIONS:
                fields[_OPTIONS[name]] = value
            elif name == "num_predict":
                fields["max_tokens"] = None if value in (-2, -1, 0) else value
            elif name not in _ENGINE_OPTIONS:
                raise RequestError(
                    f"options has {abbreviate(name)}, which is not supported. Supported: "
                    f"{', '.join((*_OPTIONS, 'num_predict'))}.",
                    "options",
                )
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            fields["guided_json"] = self.format
        elif self.format:
            raise RequestError(
                f"format must be 'json' or a JSON schema; got {abbreviate(self.format)}.", "format"
            )
        return fields

    def thinking(self) -> Json:
        if isinstance(self.think, str):
            return {"reasoning_effort": self.think}
        if self.think is None:
            return {}
        return {"enable_thinking": self.think}


class OllamaChatRequest(OllamaRequest):
    """POST /api/chat"""

    messages: Annotated[list[Json], Field(max_length=limits.MAX_MESSAGES)]
    tools: Annotated[list[Json], Field(max_length=limits.MAX_TOOLS)] | None = None

    def chat(self) -> ChatRequest:
        messages = [_message(message) for message in self.messages]
        fields = {"messages": messages, "tools": self.tools, **self.common(), **self.thinking()}
        return ChatRequest.of(fields, self.num_bytes)


class OllamaGenerateRequest(OllamaRequest):
    """POST /api/generate"""

    prompt: str = ""
    system: str | None = None
    raw: bool = False

    def request(self) -> ChatRequest | CompletionRequest:
        """A chat of one message; with `raw`, a completion."""
        if self.raw:
            fields = {"prompt": self.prompt, **self.common()}
            fields.setdefault("max_tokens", 128)
            return CompletionRequest.of(fields, self.num_bytes)
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages = [*system, {"role": "user", "content": self.prompt}]
        fields = {"messages": messages, **self.common(), **self.thinking()}
        return ChatRequest.of(fields, self.num_bytes)


class _OllamaPoolingRequest(Body):
    """Fields of both endpoints for embeddings."""

    options: Json | None = None
    keep_alive: Any = None

    def embedding(self, fields: Json) -> EmbeddingRequest:
        """The request to /v1/embeddings with these fields."""
        for name in self.options or {}:
            if name not in _ENGINE_OPTIONS and name not in _OPTIONS:
                raise RequestError(
                    f"options has {abbreviate(name)}, which is not supported.", "options"
                )
        converted = EmbeddingRequest.of(
            {"model": model_name(self.model), **fields}, num_bytes=self.num_bytes
        )
        converted.add_unknown(self.unknown_fields)
        return converted


class OllamaEmbedRequest(_OllamaPoolingRequest):
    """POST /api/embed"""

    input: str | Texts
    truncate: bool = True
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None

    @classmethod
    def read_embedding(cls, raw: bytes) -> EmbeddingRequest:
        """Vectors have the length 1, and a text that is too long is cut unless `truncate` is false."""
        body = cls.read(raw)
        return body.embedding(
            {
                "input": body.input,
                "truncate_prompt_tokens": -1 if body.truncate else None,
                "dimensions": body.dimensions,
                "use_activation": True,
            }
        )


class OllamaEmbeddingsRequest(_OllamaPoolingRequest):
    """POST /api/embeddings: the older endpoint, of one text."""

    prompt: str

    @classmethod
    def read_embedding(cls, raw: bytes) -> EmbeddingRequest:
        """The vector is not normalised."""
        body = cls.read(raw)
        return body.embedding(
            {"input": body.prompt, "truncate_prompt_tokens": -1, "use_activation": False}
        )


class OllamaShowRequest(Body):
    """POST /api/show"""

    name: str | None = None
    verbose: bool | None = None


def _message(message: Json) -> Json:
    """One message; Ollama's calls have neither ids nor types, and results name their tool."""
    if message.get("images"):
        raise RequestError("messages with images are not supported.", "messages")
    converted: Json = {key: message[key] for key in ("role", "content") if key in message}
    if message.get("thinking"):
        converted["reasoning_content"] = message["thinking"]
    if message.get("tool_name"):
        converted["name"] = message["tool_name"]
    calls = message.get("tool_calls") or []
    if not all(isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls):
        raise RequestError("each of tool_calls must have a function.", "messages")
    if calls:
        converted["tool_calls"] = [_call(i, call["function"]) for i, call in enumerate(calls)]
    return converted


def _call(index: int, function: Json) -> Json:
    arguments = msgspec.json.encode(function.get("arguments", {})).decode()
    function = {"name": function.get("name"), "arguments": arguments}
    return {"id": f"call_{index}", "type": "function", "function": function}
