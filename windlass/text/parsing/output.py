"""What a parser finds: reasoning, content and tool calls, as events while text arrives."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from windlass.text.parsing import model_json
from windlass.text.parsing.call_grammar import local_reference

_ID_CHARS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """More of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON arguments of a tool call."""

    index: int
    text: str


Event = ReasoningText | ContentText | CallStart | CallArguments


def call_id() -> str:
    """An id as OpenAI's."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """An id as Mistral's chat templates accept it: nine letters and digits."""
    return "".join(secrets.choice(_ID_CHARS) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools that a request offers: the JSON schema of each one's parameters, by name."""

    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    max_calls: int | None = None  # later calls are dropped; None: no limit
    forced: bool = False  # whether the model must call a tool
    strict: frozenset[str] = frozenset()  # tools whose calls must follow their schemas
    only_these: bool = False  # the model sees others, which it may not call
    beside_answer: bool = False  # an output without calls is an answer of a given format

    def __contains__(self, name: str) -> bool:
        return name in self.schemas

    def encode(self, name: str, parameter: str, text: str) -> str:
        """The JSON of a parameter that was written as plain text.

        Text stays a string where the schema wants one, and where it is no JSON.
        """
        root = self.schemas.get(name, {})
        properties = root.get("properties", {})
        schema = properties.get(parameter, {}) if isinstance(properties, dict) else {}
        schema = local_reference(root, schema)
        if isinstance(schema, dict) and not _is_text(schema, text):
            try:
                return model_json.encode(model_json.decode(text))
            except ValueError:
                pass
        return json.dumps(text, ensure_ascii=False)


def _is_text(schema: Mapping[str, Any], text: str) -> bool:
    """Whether a schema wants this text as a string."""
    listed = schema.get("enum")
    return schema.get("type") == "string" or (isinstance(listed, list) and text in listed)


class OutputSink:
    """Collects the events of a parser.

    Whitespace between content and a call belongs to neither, so trailing whitespace of content is
    held back until more content follows.
    """

    def __init__(self, tools: ToolSet | None, make_id: Callable[[], str] = call_id) -> None:
        self.tools = tools or ToolSet()
        self._make_id = make_id
        self._events: list[Event] = []
        self._reasoning: list[str] = []
        self._spaces = ""
        self._holds_spaces = tools is not None
        self.num_calls = 0

    def take(self) -> list[Event]:
        """The events since the last call of this method."""
        events, self._events = self._events, []
        return events

    def content(self, text: str) -> None:
        text = self._spaces + text
        kept = text.rstrip() if self._holds_spaces else text
        self._spaces = text[len(kept) :]
        self._content(kept)

    def _content(self, text: str) -> None:
        if text:
            self._events.append(ContentText(text))

    def reasoning(self, text: str) -> None:
        if text:
            self._reasoning.append(text)
            self._events.append(ReasoningText(text))

    @property
    def all_reasoning(self) -> str:
        """The reasoning of all events."""
        return "".join(self._reasoning)

    def start_call(self, name: str, id_: str | None = None) -> Call:
        self._spaces = ""
        index, self.num_calls = self.num_calls, self.num_calls + 1
        if self.tools.max_calls is not None and index >= self.tools.max_calls:
            return Call(None, index)
        self._events.append(CallStart(index, id_ or self._make_id(), name))
        return Call(self._add, index)

    def _add(self, event: Event) -> None:
        self._events.append(event)

    def end(self) -> None:
        """The text has ended: whitespace that no call followed is content."""
        if not self.num_calls:
            self._content(self._spaces)
        self._spaces = ""


class Call:
    """A call that has begun."""

    def __init__(self, add: Callable[[Event], None] | None, index: int) -> None:
        self._add = add
        self._index = index
        self.has_arguments = False

    def arguments(self, text: str) -> None:
        if text and self._add is not None:
            self._add(CallArguments(self._index, text))
        self.has_arguments = self.has_arguments or bool(text)


@dataclass(slots=True)
class ToolCall:
    """One tool call."""

    id: str
    name: str
    arguments: str = ""

    @property
    def values(self) -> dict[str, Any]:
        """The arguments as an object; {} for a call that was cut, or whose arguments are no JSON object."""
        try:
            values = model_json.decode(self.arguments)
        except ValueError:
            return {}
        return values if isinstance(values, dict) else {}


@dataclass(slots=True)
class ParsedMessage:
    """A whole message."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case ReasoningText(text):
                    self.reasoning += text
                case ContentText(text):
                    self.content += text
                case CallStart(_, id_, name):
                    self.calls.append(ToolCall(id_, name))
                case CallArguments(index, text):
                    self.calls[index].arguments += text
