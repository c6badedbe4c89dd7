"""Tool calls as JSON objects: {"name": "…", "arguments": {…}}, alone or in an array.

Many dialects put such objects between their own markers. The dialect of this module has none: the
whole output is an object or an array, or it is no call. Grammars of required calls produce it.
"""

from __future__ import annotations

from windlass.text.parsing import model_json
from windlass.text.parsing.call_grammar import CallGrammar
from windlass.text.parsing.dialect import Begins, Dialect
from windlass.text.parsing.output import Call, OutputSink, ToolSet
from windlass.text.parsing.reader import Reader, Sink, Steps, json_string, json_text

_ARGUMENTS = ("arguments", "parameters")


def read_calls(
    reader: Reader, out: OutputSink, *, before: str, known_only: bool = False
) -> Steps[bool]:
    """Read an object or an array of objects; returns whether the first was a call.

    If not, what was read is content, and so is the text `before` it. `known_only`: other names are no
    calls.
    """
    with reader.recording() as raw:
        found = yield from _calls(reader, out, known_only)
    if not found:
        out.content(before + "".join(raw))
    return found


def _calls(reader: Reader, out: OutputSink, known_only: bool) -> Steps[bool]:
    if not (yield from reader.skip("[")):
        return (yield from _call(reader, out, known_only))
    found = False
    while True:
        yield from reader.spaces()
        if (yield from reader.skip("]")):
            return found
        if not (yield from _call(reader, out, known_only)):
            return found
        found = True
        yield from reader.spaces()
        yield from reader.skip(",")


def _call(reader: Reader, out: OutputSink, known_only: bool) -> Steps[bool]:
    """Read one object. Its arguments are passed on as they arrive, once the name is known."""
    if not (yield from reader.skip("{")):
        return False
    call: Call | None = None
    id_: str | None = None
    early = ""  # arguments that came before the name
    while True:
        yield from reader.spaces()
        if (yield from reader.skip("}")):
            break
        key = yield from json_string(reader)
        yield from reader.spaces()
        if key is None or not (yield from reader.skip(":")):
            return call is not None
        yield from reader.spaces()
        if key == "name" and call is None:
            name = yield from json_string(reader)
            if name is None or (known_only and name not in out.tools):
                return False
            call = out.start_call(name, id_)
            call.arguments(early)
        elif key in _ARGUMENTS and call is not None and not call.has_arguments:
            yield from _arguments(reader, call.arguments)
        elif key in _ARGUMENTS:
            pieces: list[str] = []
            yield from _arguments(reader, pieces.append)
            early = early or "".join(pieces)
        elif key == "id":
            id_ = yield from json_string(reader)
        else:
            yield from json_text(reader)
        yield from reader.spaces()
        if not (yield from reader.skip(",")) and (yield from reader.peek()) != "}":
            return call is not None
    if call is not None and not call.has_arguments:
        call.arguments("{}")
    return call is not None


def begins_with_object(opening: str, key: str) -> Begins:
    """Whether an output begins with a call as grammars write it: its name, then its arguments under `key`."""

    def begins(reader: Reader, tools: ToolSet) -> Steps[bool]:
        for bracket in opening:
            if not (yield from reader.skip(bracket)):
                return False
            yield from reader.spaces()
        for allowed, then in (({"name"}, ":"), (set(tools.schemas), ","), ({key}, ":")):
            if (yield from json_string(reader)) not in allowed:
                return False
            yield from reader.spaces()
            if not (yield from reader.skip(then)):
                return False
            yield from reader.spaces()
        return True

    return begins


def _arguments(reader: Reader, sink: Sink) -> Steps[None]:
    """Read arguments: an object, or a string that contains one."""
    if (yield from reader.peek()) != '"':
        yield from reader.json_value(sink)
        return
    text = yield from json_text(reader)
    try:
        sink(model_json.decode(text))
    except ValueError:
        sink(text)


def _read(reader: Reader, out: OutputSink) -> Steps[None]:
    spaces = yield from reader.spaces()
    fenced = yield from reader.skip("```json")
    if fenced:
        spaces += "```json" + (yield from reader.spaces())
    if (yield from reader.peek()) not in ("{", "["):
        out.content(spaces)
    elif (yield from read_calls(reader, out, before=spaces, known_only=True)) and fenced:
        yield from reader.until("```")
    yield from reader.rest(out.content)


def _grammar(grammar: CallGrammar) -> str:
    calls = grammar.calls()
    if not grammar.has_answer:
        calls += f' | "```json" SPACE? {calls} SPACE? "```"'
    return grammar.text_or_calls(r"/[^{\[ \t\r\n](.|\n)*/ & ~/```json(.|\n)*/", calls)


DIALECT = Dialect(
    name="json", read=_read, grammar=_grammar, begins=begins_with_object("[{", "arguments")
)
