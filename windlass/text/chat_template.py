"""Renders conversations with a model's Jinja chat template, in Jinja's sandbox.

A template that cannot render the simplest conversation is an error at start, not at the first
request. The tokenizer interprets special tokens and encodes the text.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from windlass.errors import ConfigError, RequestError
from windlass.text.tool_prompt import calls_as_text, with_tools

Conversation = Sequence[Mapping[str, Any]]

# Exceptions that a template's expressions may raise for a client's values.
_TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)

_MAX_MESSAGE_CHARS = 500

_USER = {"role": "user", "content": "Hello."}
_SYSTEM = {"role": "system", "content": "Be brief, says the windlass."}
_ASSISTANT = {"role": "assistant", "content": "Hi."}
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Turns a windlass.",
        "parameters": {"type": "object", "properties": {"turns": {"type": "integer"}}},
    },
}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "probe0123",
            "type": "function",
            "function": {"name": "probe_tool", "arguments": {"turns": 4711}},
        }
    ],
}
_RESULT = {"role": "tool", "tool_call_id": "probe0123", "content": "It turned 815 times."}


class _GenerationBlocks(Extension):
    """Ignores `{% generation %}` tags, with which some templates mark assistant text for training."""

    tags = {"generation"}  # noqa: RUF012 - name and type are Jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def compile_template(source: str) -> Template:
    """Compile a template in the sandbox."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlocks]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template does not parse: line {error.lineno}: {_clipped(error.message or '')}. "
            "Give another one with --chat-template."
        ) from error
    except _TEMPLATE_ERRORS as error:  # too deeply nested, or a constant that cannot be computed
        raise ConfigError(
            f"the chat template cannot be compiled: {_explain(error)}. Give another one with "
            "--chat-template."
        ) from error


def _line_of(error: BaseException) -> int | None:
    """The template's line that raised; Jinja writes it into the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
    return lines[-1] if lines else None


def _explain(error: BaseException) -> str:
    line = _line_of(error)
    where = f"line {line}: " if line is not None else ""
    return where + _clipped(str(error) or type(error).__name__)


def _clipped(message: str) -> str:
    """A template may quote a whole conversation in its error, or have a tag of any length."""
    if len(message) <= _MAX_MESSAGE_CHARS:
        return message
    return f"{message[:_MAX_MESSAGE_CHARS]}…"


class ChatTemplate:
    """A compiled template. `warnings` lists conversations that it cannot render, for the log.

    A template that drops tools, or calls and their results, gets them as plain messages.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self._template = compile_template(source)
        self._special_tokens = dict(special_tokens)
        self._defaults = dict(defaults or {})
        self._has_developer = "developer" in source
        self.warnings = tuple(self._probe())
        self._has_tools = self._shows([_USER], ("probe_tool",))
        self._has_calls = self._shows([_USER, _CALL, _RESULT], ("probe_tool", "4711", "815"))

    def _probe(self) -> list[str]:
        """Render probe conversations; only a failure of the simplest one is an error."""
        try:
            self._render([_USER], {}, add_generation_prompt=True)
        except _TEMPLATE_ERRORS as error:
            raise ConfigError(
                "the chat template cannot render a conversation of one user message: "
                f"{_explain(error)}. Give another one with --chat-template."
            ) from error
        warnings = []
        probes = {"system messages": [_SYSTEM, _USER], "several turns": [_USER, _ASSISTANT, _USER]}
        for what, messages in probes.items():
            try:
                text = self._render(messages, {}, add_generation_prompt=True)
            except _TEMPLATE_ERRORS as error:
                warnings.append(f"the chat template refuses {what}: {_explain(error)}")
                continue
            missing = [message for message in messages if message["content"] not in text]
            if missing:
                warnings.append(f"the chat template drops {what}")
        return warnings

    def _shows(self, messages: Conversation, texts: Sequence[str]) -> bool:
        """Whether a conversation with a tool renders, with all of `texts` in it."""
        try:
            rendered = self._render(messages, {}, add_generation_prompt=True, tools=[_TOOL])
        except _TEMPLATE_ERRORS:
            return False
        return all(text in rendered for text in texts)

    def _render(
        self,
        messages: Conversation,
        options: Mapping[str, Any],
        add_generation_prompt: bool,
        tools: Conversation | None = None,
    ) -> str:
        values = {**self._special_tokens, **self._defaults, **options}
        if tools:
            values["tools"] = tools
        return self._template.render(
            messages=messages, add_generation_prompt=add_generation_prompt, **values
        )

    def render(
        self,
        messages: Conversation,
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final: bool = False,
        *,
        tools: Conversation = (),
    ) -> str:
        """Return the prompt's text. Raises RequestError with the template's message if it refuses.

        `continue_final` leaves the last message, the assistant's, open for the model to continue.
        """
        self._check(messages, options or {}, add_generation_prompt, continue_final)
        if not self._has_calls:
            messages = calls_as_text(messages)
        if tools and not self._has_tools:
            messages, tools = with_tools(messages, tools), ()
        messages = [self._with_role(message) for message in messages]
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final
        try:
            text = self._render(messages, options or {}, add_generation_prompt, tools)
        except _TEMPLATE_ERRORS as error:
            raise RequestError(
                f"the model's chat template refused the messages: {_explain(error)}", "messages"
            ) from error
        return _cut_after(text, messages[-1]["content"]) if continue_final else text

    def _check(
        self,
        messages: Conversation,
        options: Mapping[str, Any],
        add_generation_prompt: bool | None,
        continue_final: bool,
    ) -> None:
        if not messages:
            raise RequestError("messages is empty; send at least one message.", "messages")
        reserved = {"messages", "tools", "add_generation_prompt", *self._special_tokens} & set(
            options
        )
        if reserved:
            raise RequestError(
                f"chat_template_kwargs must not set {', '.join(sorted(reserved))}.",
                "chat_template_kwargs",
            )
        if not continue_final:
            return
        if add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other.",
                "continue_final_message",
            )
        if messages[-1]["role"] != "assistant" or not messages[-1]["content"].strip():
            raise RequestError(
                "continue_final_message needs a last message of role 'assistant' with content.",
                "continue_final_message",
            )

    def _with_role(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Rename the role 'developer' to 'system' unless the template knows it."""
        if message["role"] == "developer" and not self._has_developer:
            return {**message, "role": "system"}
        return message


def _cut_after(text: str, content: str) -> str:
    """Cut the text that a template adds after the last message, whose content it may have stripped."""
    for last in (content, content.strip()):
        at = text.rfind(last)
        if at >= 0:
            return text[: at + len(last)]
    raise RequestError(
        "continue_final_message: the chat template does not write the last message unchanged.",
        "continue_final_message",
    )
