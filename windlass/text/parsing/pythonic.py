"""Llama 3.2 and 4: a list of Python calls, [get_weather(city='Paris'), now()]."""

from __future__ import annotations

import ast
import json
from typing import Any

from windlass.text.parsing.dialect import Dialect
from windlass.text.parsing.output import OutputSink
from windlass.text.parsing.reader import Reader, Steps

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
        name = yield from reader.word(r"[\w.]")
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
        return json.dumps(values, ensure_ascii=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


DIALECT = Dialect(
    name="pythonic",
    read=_read,
    marks=(("[func_name1(",), ("<|python_start|>",)),
    special_tokens=True,
)
