"""The request bodies of OpenAI's Responses API, and their conversion to chat requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from windlass.errors import RequestError
from windlass.serve import body_limits as limits
from windlass.serve.abbreviate import abbreviate
from windlass.serve.protocol import (
    Body,
    ChatRequest,
    DeadlineField,
    OutputLimit,
    ReasoningEffort,
    ThinkingBudget,
    Verbosity,
)

Json = dict[str, Any]

_TEXT_PARTS = ("input_text", "output_text", "text")


class ResponsesReasoning(BaseModel):
    model_config = ConfigDict(strict=True)

    effort: ReasoningEffort | None = None
    max_tokens: ThinkingBudget | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    format: Json | None = None
    verbosity: Verbosity | None = None


class ResponsesRequest(Body, DeadlineField):
    """POST /v1/responses"""

    input: str | Annotated[list[Json], Field(max_length=limits.MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: OutputLimit | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: Json | None = None
    tools: Annotated[list[Json], Field(max_length=limits.MAX_TOOLS)] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ResponsesReasoning | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: Literal[False] | None = None
    include: list[str] | None = None
    user: str | None = None

    def messages(self) -> list[Json]:
        """The messages of `input`."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return messages_of(self.input)

    def chat(self, earlier: Sequence[Json]) -> ChatRequest:
        """The chat request after the messages of an earlier response."""
        system = []
        if self.instructions is not None:
            system = [{"role": "system", "content": self.instructions}]
        fields: Json = {
            "model": self.model,
            "messages": [*system, *earlier, *self.messages()],
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "tools": [_tool(tool) for tool in self.tools or ()],
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "thinking_token_budget": None if self.reasoning is None else self.reasoning.max_tokens,
            "response_format": self._response_format(),
            "verbosity": None if self.text is None else self.text.verbosity,
            "user": self.user,
        }
        if self.truncation == "auto":
            fields["truncate_prompt_tokens"] = -1
        return ChatRequest.of(fields, self.num_bytes)

    def _response_format(self) -> Json | None:
        chosen = None if self.text is None else self.text.format
        if chosen is None or chosen.get("type") != "json_schema":
            return chosen
        return {"type": "json_schema", "json_schema": chosen}


def _tool(tool: Json) -> Json:
    if tool.get("type") != "function":
        raise RequestError(
            f"tools of type {abbreviate(tool.get('type'))} run on the server, which this one does "
            "not do. Tools of type function work.",
            "tools",
        )
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _text(content: Any, kinds: Sequence[str] = _TEXT_PARTS) -> str:
    """The text of a string or of parts."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [None]:
        match part:
            case {"type": str(kind), "text": str(text)} if kind in kinds:
                texts.append(text)
            case _:
                given = part.get("type") if isinstance(part, dict) else part
                raise RequestError(
                    f"a content part of type {abbreviate(given)} is not supported or lacks its text. "
                    f"Supported: {', '.join(kinds)}.",
                    "input",
                )
    return "\n".join(texts)


def messages_of(items: Sequence[Json]) -> list[Json]:
    """The messages of input items. Reasoning and calls belong to the assistant's message beside them."""
    messages: list[Json] = []
    reasoning = ""
    for item in items:
        match item:
            case {"role": str(role), "content": content}:
                messages.append({"role": role, "content": _text(content)})
                if role == "assistant" and reasoning:
                    messages[-1]["reasoning_content"], reasoning = reasoning, ""
            case {"type": "function_call", "call_id": str(id_), "name": str(name)}:
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                if reasoning:
                    messages[-1]["reasoning_content"], reasoning = reasoning, ""
                function = {"name": name, "arguments": item.get("arguments", "")}
                call = {"id": id_, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
            case {"type": "function_call_output", "call_id": str(id_), "output": output}:
                content = _text(output)
                messages.append({"role": "tool", "tool_call_id": id_, "content": content})
            case {"type": "reasoning"}:
                reasoning = _text(item.get("content") or "", ("reasoning_text",))
            case _:
                raise RequestError(
                    f"an input item of type {abbreviate(item.get('type'))} is not supported or lacks "
                    "fields. Supported: message, function_call, function_call_output, reasoning.",
                    "input",
                )
    return messages
