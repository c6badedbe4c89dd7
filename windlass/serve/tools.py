"""Tools of a chat request: what a client may send, and which of them the model may or must call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from windlass.errors import RequestError
from windlass.serve.abbreviate import abbreviate
from windlass.serve.fields import validation_error
from windlass.serve.json_body import decode
from windlass.text.parsing.output import ToolSet

# The argument under which a template gets a call's arguments that are no JSON object.
INVALID_JSON = "invalid_json"


class Function(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.\-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """One item of `tools`. The chat template gets all its fields but `strict`."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: Function


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request that the model may call; `forced`: it must call one of them.

    allowed: names of those that it may call although it sees all; None: all.
    """

    tools: tuple[Tool, ...]
    forced: bool
    parallel: bool
    allowed: frozenset[str] | None = None

    def for_template(self) -> list[dict[str, Any]]:
        hidden = {"function": {"strict"}}  # concerns the server, not the model
        return [tool.model_dump(exclude_none=True, exclude=hidden) for tool in self.tools]

    @property
    def tool_set(self) -> ToolSet:
        functions = [
            tool.function
            for tool in self.tools
            if self.allowed is None or tool.function.name in self.allowed
        ]
        return ToolSet(
            {function.name: function.parameters or {} for function in functions},
            max_calls=None if self.parallel else 1,
            forced=self.forced,
            strict=frozenset(function.name for function in functions if function.strict),
            only_these=self.allowed is not None,
        )


def read_tools(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Validate tools that did not come over HTTP."""
    try:
        return [Tool.model_validate(dict(tool)) for tool in tools]
    except ValidationError as error:
        raise validation_error(error, "tools") from None


def tool_use(
    tools: Sequence[Tool] | None, choice: str | Mapping[str, Any] | None, parallel: bool | None
) -> ToolUse | None:
    """Which tools the model may or must call; None: none."""
    tools = tools or ()
    names = [tool.function.name for tool in tools]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise RequestError(f"two tools have the name {double!r}.", "tools")
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        mode, allowed = _allowed(choice)
        for name in allowed:
            _check_known(name, names)
        return ToolUse(
            tuple(tools),
            forced=mode == "required",
            parallel=parallel is not False,
            allowed=frozenset(allowed),
        )
    if isinstance(choice, Mapping):
        named = _named(choice)
        _check_known(named, names)
        (tool,) = [tool for tool in tools if tool.function.name == named]
        return ToolUse((tool,), forced=True, parallel=False)
    if choice not in (None, "auto", "none", "required"):
        raise RequestError(
            "tool_choice must be 'auto', 'none', 'required', "
            '{"type": "function", "function": {"name": "…"}} or '
            f'{{"type": "allowed_tools", …}}; got {abbreviate(choice)}.',
            "tool_choice",
        )
    if choice == "required" and not tools:
        raise RequestError("tool_choice is 'required', but there are no tools.", "tool_choice")
    if not tools or choice == "none":
        return None
    return ToolUse(tuple(tools), forced=choice == "required", parallel=parallel is not False)


def _named(choice: Mapping[str, Any]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
    if choice.get("type") != "function" or not isinstance(name, str):
        raise RequestError(
            'tool_choice must be {"type": "function", "function": {"name": "…"}}; got '
            f"{abbreviate(choice)}.",
            "tool_choice",
        )
    return name


def _check_known(name: str, names: Sequence[str]) -> None:
    if name not in names:
        known = ", ".join(names) or "none"
        raise RequestError(
            f"tool_choice names {abbreviate(name)}, which is not in tools ({known}).",
            "tool_choice",
        )


def _allowed(choice: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The mode and the names of allowed tools, in the form of either of OpenAI's APIs."""
    given = choice.get("allowed_tools", choice)
    match given:
        case {"mode": "auto" | "required" as mode, "tools": [_, *_] as allowed} if all(
            isinstance(tool, Mapping) for tool in allowed
        ):
            return str(mode), [_named(tool) for tool in allowed]
    raise RequestError(
        'tool_choice of type allowed_tools must have a mode ("auto" or "required") and tools, a list of '
        f'{{"type": "function", "function": {{"name": "…"}}}}; got {abbreviate(given)}.',
        "tool_choice",
    )


def check_calls(calls: Sequence[Mapping[str, Any]]) -> None:
    """Refuse tool calls of a message without a function, its name, or its arguments."""
    for call in calls:
        function = call.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(
                "each of tool_calls must have a function with a name, such as "
                '{"id": "…", "type": "function", "function": {"name": "…", "arguments": "{…}"}}.',
                "messages",
            )


def with_decoded_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose tool calls have their arguments as objects, as chat templates expect them."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    check_calls(calls)
    content = message.get("content") or ""
    return {**message, "content": content, "tool_calls": [_decoded(call) for call in calls]}


def _decoded(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _as_object(arguments)
    if not isinstance(arguments, dict):
        raise RequestError("the arguments of a tool call must be a JSON object.", "messages")
    return {**call, "function": {**function, "arguments": arguments}}


def _as_object(arguments: str) -> dict[str, Any]:
    """The arguments that a model wrote. It sees its own mistake again where they are no JSON object."""
    try:
        decoded = decode(arguments.encode() or b"{}", "the arguments of a tool call")
    except RequestError:
        decoded = None
    return decoded if isinstance(decoded, dict) else {INVALID_JSON: arguments}
