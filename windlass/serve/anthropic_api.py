"""The request bodies of Anthropic's Messages API, and their conversion to chat requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from windlass.errors import RequestError
from windlass.serve import body_limits as limits
from windlass.serve.abbreviate import abbreviate
from windlass.serve.protocol import (
    INT64,
    Body,
    ChatRequest,
    DeadlineField,
    OutputLimit,
    StopStrings,
    TokenizeChatRequest,
)

Json = dict[str, Any]

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class AnthropicMessage(BaseModel):
    """One message: text, or a list of content blocks."""

    model_config = ConfigDict(strict=True)

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Json], Field(max_length=limits.MAX_CONTENT_PARTS)]


class AnthropicTool(BaseModel):
    """A tool of the client. Tools that the server would run have a `type` and are refused."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str
    description: str | None = None
    input_schema: Json | None = None
    type: str | None = None
    strict: bool | None = None


class OutputConfig(BaseModel):
    """How long the model should reason, and the format of its answer."""

    model_config = ConfigDict(strict=True)

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Json | None = None


class CountedRequest(Body):
    """The fields that make up a prompt; POST /v1/messages/count_tokens has no others."""

    messages: Annotated[list[AnthropicMessage], Field(max_length=limits.MAX_MESSAGES)]
    system: str | list[Json] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=limits.MAX_TOOLS)] | None = None
    tool_choice: Json | None = None
    thinking: Json | None = None
    output_config: OutputConfig | None = None

    def conversation(self) -> Json:
        """The fields of the chat request that make up its prompt."""
        messages = [] if self.system is None else [_system(self.system)]
        for message in self.messages:
            messages += _converted(message)
        fields: Json = {"model": self.model, "messages": messages}
        if self.tools:
            fields["tools"] = [_tool(tool) for tool in self.tools]
        if self.tool_choice is not None:
            fields |= _choice(self.tool_choice)
        if self.thinking is not None:
            enabled = self.thinking.get("type") != "disabled"
            fields["enable_thinking"] = enabled
        if self.output_config is not None and self.output_config.effort is not None:
            effort = self.output_config.effort
            fields["reasoning_effort"] = "xhigh" if effort == "max" else effort
        return fields


class MessagesRequest(CountedRequest, DeadlineField):
    """POST /v1/messages"""

    max_tokens: OutputLimit
    temperature: float | None = None
    top_p: float | None = None
    top_k: INT64 | None = None
    stop_sequences: StopStrings | None = None
    stream: bool | None = None
    metadata: Json | None = None
    service_tier: str | None = None

    def chat(self) -> ChatRequest:
        fields = self.conversation() | {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences,
            "stream": self.stream,
            "thinking_token_budget": self._thinking_budget(),
            "response_format": self._response_format(),
        }
        return ChatRequest.of(fields, self.num_bytes)

    def _response_format(self) -> Json | None:
        chosen = None if self.output_config is None else self.output_config.format
        if chosen is None:
            return None
        if chosen.get("type") != "json_schema" or "schema" not in chosen:
            raise RequestError(
                'output_config.format must be {"type": "json_schema", "schema": {…}}; got '
                f"{abbreviate(chosen)}.",
                "output_config",
            )
        return {"type": "json_schema", "json_schema": chosen}

    def _thinking_budget(self) -> int | None:
        budget = (self.thinking or {}).get("budget_tokens")
        if budget is not None and (type(budget) is not int or budget < 0):
            raise RequestError(
                f"thinking.budget_tokens must be a whole number >= 0; got {abbreviate(budget)}.",
                "thinking",
            )
        return budget

    @staticmethod
    def read_to_count(raw: bytes) -> TokenizeChatRequest:
        """Read the body of a count; the fields of a generation have no effect on it."""
        body = CountedRequest.read(raw)
        chat = TokenizeChatRequest.of(body.conversation(), body.num_bytes)
        known = MessagesRequest.model_fields
        chat.add_unknown(error for error in body.unknown_fields if error.param not in known)
        return chat


def _texts(blocks: str | list[Json], what: str) -> str:
    """The text of a string or of blocks of type text."""
    if isinstance(blocks, str):
        return blocks
    texts = []
    for block in blocks:
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise RequestError(
                f"{what} may have blocks of type text only; got {abbreviate(block.get('type'))}.",
                "messages",
            )
        texts.append(block["text"])
    return "\n".join(texts)


def _system(system: str | list[Json]) -> Json:
    return {"role": "system", "content": _texts(system, "system")}


def _converted(message: AnthropicMessage) -> list[Json]:
    """One message of Anthropic's format; results of tools become messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[Json] = []
    results: list[Json] = []
    for block in message.content:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "thinking", "thinking": str(text)}:
                reasoning.append(text)
            case {"type": "redacted_thinking"}:
                pass  # encrypted: only the model that wrote it can read it
            case {"type": "document", "source": {"type": "text", "data": str(text)}}:
                title = block.get("title")
                texts.append(f"{title}\n{text}" if isinstance(title, str) else text)
            case {"type": "tool_use", "id": str(id_), "name": str(name), "input": dict(values)}:
                arguments = msgspec.json.encode(values).decode()
                function = {"name": name, "arguments": arguments}
                calls.append({"id": id_, "type": "function", "function": function})
            case {"type": "tool_result", "tool_use_id": str(id_)}:
                content = _texts(block.get("content") or "", "a tool_result")
                if block.get("is_error"):
                    content = f"Error: {content}"
                results.append({"role": "tool", "tool_call_id": id_, "content": content})
            case _:
                raise RequestError(
                    f"a content block of type {abbreviate(block.get('type'))} is not supported or "
                    "lacks fields. Supported: text, thinking, redacted_thinking, document with a source of "
                    "type text, tool_use, tool_result.",
                    "messages",
                )
    if results and not (texts or calls or reasoning):
        return results
    converted: Json = {"role": message.role, "content": "\n".join(texts)}
    if reasoning:
        converted["reasoning_content"] = "\n".join(reasoning)
    if calls:
        converted["tool_calls"] = calls
    return [*results, converted]


def _tool(tool: AnthropicTool) -> Json:
    if tool.type not in (None, "custom"):
        raise RequestError(
            f"tools of type {abbreviate(tool.type)} run on the server, which this one does not do. "
            "Tools with an input_schema work.",
            "tools",
        )
    function: Json = {"name": tool.name, "parameters": tool.input_schema or {}}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice(choice: Json) -> Json:
    kind = choice.get("type")
    fields: Json = {"parallel_tool_calls": not choice.get("disable_parallel_tool_use", False)}
    if kind == "tool":
        return fields | {
            "tool_choice": {"type": "function", "function": {"name": choice.get("name")}}
        }
    if kind not in _CHOICES:
        raise RequestError(
            f"tool_choice.type must be auto, any, tool or none; got {abbreviate(kind)}.",
            "tool_choice",
        )
    return fields | {"tool_choice": _CHOICES[kind]}
