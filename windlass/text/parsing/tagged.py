"""Calls with one pair of tags per parameter: Qwen3-Coder and GLM 4.5.

Parameters are plain text; the schema of the tool says which of them are strings.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from windlass.text.parsing.call_grammar import (
    CallGrammar,
    definitions,
    literal,
    local_reference,
)
from windlass.text.parsing.dialect import Dialect, begins_with
from windlass.text.parsing.output import Call, OutputSink
from windlass.text.parsing.reader import Reader, Steps


class _Parameters:
    """Writes the arguments of a call, one parameter after the other."""

    def __init__(self, out: OutputSink, name: str) -> None:
        self._out, self._name = out, name
        self._call: Call = out.start_call(name)
        self._separator = "{"

    def add(self, parameter: str, text: str) -> None:
        key = json.dumps(parameter, ensure_ascii=False)
        value = self._out.tools.encode(self._name, parameter, text)
        self._call.arguments(f"{self._separator}{key}: {value}")
        self._separator = ", "

    def end(self) -> None:
        self._call.arguments("}" if self._call.has_arguments else "{}")


def _text_until(reader: Reader, *markers: str) -> Steps[tuple[str, str | None]]:
    pieces: list[str] = []
    marker = yield from reader.until(*markers, sink=pieces.append)
    return "".join(pieces), marker


def _read_qwen(reader: Reader, out: OutputSink) -> Steps[None]:
    """<tool_call><function=name><parameter=key>value</parameter></function></tool_call>"""
    while (
        marker := (yield from reader.until("<tool_call>", "<function=", sink=out.content))
    ) is not None:
        if marker == "<tool_call>":
            spaces = yield from reader.spaces()
            if not (yield from reader.skip("<function=")):
                out.content(marker + spaces)
                continue
        name, closed = yield from _text_until(reader, ">")
        if closed is None:
            out.content(f"<function={name}")
            return
        parameters = _Parameters(out, name.strip())
        while (yield from reader.until("<parameter=", "</function>")) == "<parameter=":
            key, _ = yield from _text_until(reader, ">")
            text, closed = yield from _text_until(reader, "</parameter>")
            if closed is None:
                return  # the output was cut: the client sees arguments without an end
            parameters.add(key.strip(), text.removeprefix("\n").removesuffix("\n"))
        parameters.end()
        yield from reader.spaces()
        yield from reader.skip("</tool_call>")


def _read_glm(reader: Reader, out: OutputSink) -> Steps[None]:
    """<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>"""
    keys = ("<arg_key>", "</tool_call>")
    while (yield from reader.until("<tool_call>", sink=out.content)) is not None:
        name, marker = yield from _text_until(reader, *keys)
        if marker is None or not name.strip():
            out.content(f"<tool_call>{name}{marker or ''}")
            continue
        parameters = _Parameters(out, name.strip())
        while marker == "<arg_key>":
            key, _ = yield from _text_until(reader, "</arg_key>")
            yield from reader.until("<arg_value>")
            text, closed = yield from _text_until(reader, "</arg_value>")
            if closed is None:
                return
            parameters.add(key.strip(), text)
            marker = yield from reader.until(*keys)
        parameters.end()


def _is_text(schema: Any) -> bool:
    """Whether a parameter may be any text. Text that is no JSON becomes a string."""
    if not isinstance(schema, dict) or schema.keys() & {"const", "enum"}:
        return not isinstance(schema, dict)
    kinds = schema.get(
        "type", () if schema.keys() & {"$ref", "anyOf", "oneOf", "allOf"} else "string"
    )
    return "string" in kinds or any(
        map(_is_text, [*schema.get("anyOf", ()), *schema.get("oneOf", ())])
    )


def _parameters(
    grammar: CallGrammar, tool: str, *, write: Callable[[str], str], end: str, around: str = ""
) -> str:
    """Add a rule for the parameters of a tool, in the schema's order; `write` begins one, `end` ends it.

    `around`: what is not part of a text beside it.
    """
    rule = f"parameters{list(grammar.tools).index(tool)}"
    schema = grammar.tools[tool]
    if not schema:
        return grammar.add(rule, f"({write('')} any SPACE?)*")
    parts = []
    properties = schema.get("properties", {})
    for name, given in properties.items():
        resolved = local_reference(schema, given)
        values = resolved.get("enum") if isinstance(resolved, dict) else None
        if values and all(isinstance(value, str) for value in values):
            value = f"{around} ({' | '.join(map(literal, values))}) {around} {grammar.mark(end)}"
        elif _is_text(resolved):
            value = "any"
        else:
            own = {**definitions(schema), **given}
            value = f"SPACE? {grammar.json(own)} SPACE? {grammar.mark(end)}"
        written = f"{write(name)} {value} SPACE?"
        parts.append(written if name in schema.get("required", ()) else f"({written})?")
    return grammar.add(rule, " ".join(parts) or '""')


def _qwen_grammar(grammar: CallGrammar) -> str:
    def write(name: str) -> str:
        return literal(f"<parameter={name}>") if name else '"<parameter=" /[^>\\n]{1,100}/ ">"'

    grammar.until("any", "</parameter>")
    calls = []
    for name in grammar.tools:
        parameters = _parameters(grammar, name, write=write, end="</parameter>", around=r'"\n"?')
        calls.append(f"{literal(f'{name}>')} SPACE? {parameters}")
    end = f'"</function>" (SPACE? {grammar.mark("</tool_call>")})?'
    return grammar.text_with_calls(
        "<function=",
        f"({' | '.join(calls)}) {end}",
        before=f"({grammar.mark('<tool_call>')} SPACE?)? ",
    )


def _glm_grammar(grammar: CallGrammar) -> str:
    key, key_end, value = (grammar.mark(f"<{tag}>") for tag in ("arg_key", "/arg_key", "arg_value"))

    def write(name: str) -> str:
        own = literal(name) if name else "/[^<\\n]{1,100}/"
        return f"{key} {own} {key_end} SPACE? {value}"

    grammar.until("any", "</arg_value>")
    calls = [
        f"{literal(name)} SPACE? {_parameters(grammar, name, write=write, end='</arg_value>')}"
        for name in grammar.tools
    ]
    end = grammar.mark("</tool_call>")
    return grammar.text_with_calls("<tool_call>", f"SPACE? ({' | '.join(calls)}) {end}")


QWEN = Dialect(
    name="qwen3_coder",
    read=_read_qwen,
    grammar=_qwen_grammar,
    begins=begins_with("<tool_call>", "<function="),
    marks=(("<tool_call>", "<function="),),
)
GLM = Dialect(
    name="glm45",
    read=_read_glm,
    grammar=_glm_grammar,
    begins=begins_with("<tool_call>"),
    marks=(("<tool_call>", "<arg_key>"),),
)
