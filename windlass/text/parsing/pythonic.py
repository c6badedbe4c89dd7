"""Llama 3.2 and 4: a list of Python calls, [get_weather(city='Paris'), now()]."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from windlass.text.parsing import model_json
from windlass.text.parsing.call_grammar import (
    CallGrammar,
    Schema,
    definitions,
    literal,
    local_reference,
)
from windlass.text.parsing.dialect import Dialect
from windlass.text.parsing.output import OutputSink, ToolSet
from windlass.text.parsing.reader import Reader, Steps

_NAME = r"[\w.]"
_OPEN, _CLOSE = "([{", ")]}"


def _read(reader: Reader, out: OutputSink) -> Steps[None]:
    with reader.recording() as raw:
        yield from reader.spaces()
        yield from reader.skip("<|python_start|>")
        if (yield from reader.skip("[")):
            yield from _calls(reader, out, raw)
    if not out.num_calls:
        out.content("".join(raw))
    yield from reader.skip("<|python_end|>")
    yield from reader.rest(out.content)


def _calls(reader: Reader, out: OutputSink, raw: list[str]) -> Steps[None]:
    while True:
        yield from reader.spaces()
        start = len(raw)
        name = yield from reader.word(_NAME)
        if name not in out.tools or not (yield from _brackets(reader)):
            return
        arguments = _arguments("".join(raw[start:]))
        if arguments is None:
            return
        out.start_call(name).arguments(arguments)
        yield from reader.spaces()
        if not (yield from reader.skip(",")):
            yield from reader.skip("]")
            return


def _begins(reader: Reader, tools: ToolSet) -> Steps[bool]:
    yield from reader.skip("<|python_start|>")
    if not (yield from reader.skip("[")):
        return False
    yield from reader.spaces()
    name = yield from reader.word(_NAME)
    return name in tools and (yield from reader.skip("("))


def _brackets(reader: Reader) -> Steps[bool]:
    """Read the arguments of a call in their brackets; returns whether they are complete."""
    if (yield from reader.peek()) != "(":
        return False
    depth, quote = 0, ""
    while char := (yield from reader.peek()):
        yield from reader.skip(char)
        if char == "\\" and quote:
            yield from reader.skip((yield from reader.peek()))
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
            if depth == 0:
                return True
    return False


def _arguments(source: str) -> str | None:
    """The JSON of a call's keyword arguments; None: it is no call of literals."""
    try:
        call = ast.parse(source.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values: dict[str, Any] = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                return None
            values[keyword.arg] = ast.literal_eval(keyword.value)
        return model_json.encode(values)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


class _Values:
    """Writes the rules of Python literals that follow a schema."""

    def __init__(self, grammar: CallGrammar, root: Schema, prefix: str) -> None:
        self._grammar = grammar
        self._root = root
        self._prefix = prefix
        self._num_rules = 0
        self._references: dict[str, str] = {}

    def _name(self) -> str:
        self._num_rules += 1
        return f"{self._prefix}_{self._num_rules}"

    def value(self, schema: Any) -> str:
        match schema:
            case {"$ref": str(reference)}:
                return self._reference(reference, schema)
            case {"anyOf": [*several]} | {"oneOf": [*several]}:
                return f"({' | '.join(map(self.value, several))})"
            case {"enum": [*values]}:
                return f"({' | '.join(map(_written, values))})"
            case {"const": value}:
                return _written(value)
            case {"type": [*kinds]}:
                return f"({' | '.join(self.value({**schema, 'type': kind}) for kind in kinds)})"
            case {"type": "boolean"}:
                return '("True" | "False")'
            case {"type": "null"}:
                return '"None"'
            case {"type": "array"}:
                return self._array(schema)
            case {"type": "object", "properties": dict(properties)}:
                keys = {name: f"{literal(repr(name))} SPACE? {literal(':')}" for name in properties}
                return f'"{{" {self.items(schema, keys)} "}}"'
            case {"type": "string" | "integer" | "number"}:
                return self._grammar.json({**definitions(self._root), **schema}, compact=True)
        return "any"

    def _reference(self, reference: str, schema: Schema) -> str:
        """A rule of its own, since definitions may name themselves."""
        if reference not in self._references:
            name = self._references[reference] = self._name()
            self._grammar.add(name, self.value(local_reference(self._root, schema)))
        return self._references[reference]

    def _array(self, schema: Schema) -> str:
        item = self.value(schema.get("items"))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        limit = "" if most is None else most - 1
        more = f'(SPACE? "," SPACE? {item}){{{max(0, least - 1)},{limit}}}'
        listed = f"{item} {more}" if most != 0 else ""
        return f'"[" SPACE? {listed if least else f"({listed})?"} SPACE? "]"'

    def items(self, schema: Schema, keys: Mapping[str, str]) -> str:
        """Rules for the properties in their order: `first_i` without, `next_i` with others before."""
        properties, required = schema.get("properties", {}), schema.get("required", ())
        first, then = '""', '""'
        for name in reversed(properties):
            own = f"{keys[name]} SPACE? {self.value(properties[name])} {then}"
            skips = "" if name in required else " | "
            first = self._grammar.add(self._name(), own + (skips and skips + first))
            own = f'SPACE? "," SPACE? {own}'
            then = self._grammar.add(self._name(), own + (skips and skips + then))
        return f"SPACE? {first} SPACE?"


def _written(value: Any) -> str:
    """A literal; a string may have either kind of quotes."""
    texts = dict.fromkeys(
        [repr(value), json.dumps(value)] if isinstance(value, str) else [repr(value)]
    )
    return f"({' | '.join(map(literal, texts))})"


def _grammar(grammar: CallGrammar) -> str:
    calls = []
    for i, (name, schema) in enumerate(grammar.tools.items()):
        arguments = '(KEY "=" any (SPACE? "," SPACE? KEY "=" any)*)?'
        if schema:
            keys = {key: literal(f"{key}=") for key in schema.get("properties", {})}
            arguments = _Values(grammar, schema, f"tool{i}").items(schema, keys)
        calls.append(f'{literal(f"{name}(")} {arguments} ")"')
    grammar.add("call", " | ".join(calls))
    grammar.add("any", "STRING | NUMBER | CONSTANT | list | dict")
    grammar.add("list", '"[" SPACE? (any (SPACE? "," SPACE? any)*)? SPACE? "]"')
    grammar.add("dict", '"{" SPACE? (pair (SPACE? "," SPACE? pair)*)? SPACE? "}"')
    grammar.add("pair", 'STRING SPACE? ":" SPACE? any')
    grammar.add("STRING", r"""/'([^'\\\n]|\\.)*'|"([^"\\\n]|\\.)*"/""")
    grammar.add("NUMBER", r"/-?[0-9]{1,20}(\.[0-9]{1,20})?/")
    grammar.add("CONSTANT", '"True" | "False" | "None"')
    grammar.add("KEY", "/[a-zA-Z_][a-zA-Z0-9_]{0,63}/")
    start, end = (
        f"{grammar.mark(tag)}? " if grammar.is_special(tag) else ""
        for tag in ("<|python_start|>", "<|python_end|>")
    )
    more = "" if grammar.max_calls is not None else '(SPACE? "," SPACE? call)* '
    written = f'{start}"[" SPACE? call {more}SPACE? "]" {end}'
    return grammar.text_or_calls(r"/[^\[ \t\r\n](.|\n)*/", written)


DIALECT = Dialect(
    name="pythonic",
    read=_read,
    grammar=_grammar,
    begins=_begins,
    marks=(("[func_name1(",), ("<|python_start|>",)),
    special_tokens=True,
)
