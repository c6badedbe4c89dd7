"""Llama 3: the whole output is {"name": "…", "parameters": {…}}, or several, separated by semicolons."""

from __future__ import annotations

from windlass.text.parsing.call_grammar import CallGrammar
from windlass.text.parsing.dialect import Dialect
from windlass.text.parsing.json_calls import begins_with_object, read_calls
from windlass.text.parsing.output import OutputSink, ToolSet
from windlass.text.parsing.reader import Reader, Steps

_TAG = "<|python_tag|>"


def _read(reader: Reader, out: OutputSink) -> Steps[None]:
    spaces = yield from reader.spaces()
    if (yield from reader.skip(_TAG)):
        spaces += yield from reader.spaces()
    if (yield from reader.peek()) != "{":
        out.content(spaces)
        yield from reader.rest(out.content)
        return
    while (yield from read_calls(reader, out, before=spaces, known_only=True)):
        spaces = yield from reader.spaces()
        yield from reader.skip(";")
        yield from reader.spaces()
        yield from reader.skip(_TAG)
        yield from reader.spaces()
        if (yield from reader.peek()) != "{":
            break
    yield from reader.rest(out.content)


_begins_with_object = begins_with_object("{", "parameters")


def _begins(reader: Reader, tools: ToolSet) -> Steps[bool]:
    return (yield from reader.skip(_TAG)) or (yield from _begins_with_object(reader, tools))


def _grammar(grammar: CallGrammar) -> str:
    grammar.add("call", grammar.call("parameters"))
    more = "" if grammar.max_calls is not None else '(SPACE? ";" SPACE? call)*'
    calls = f"({grammar.mark(_TAG)} SPACE?)? call {more}"
    return grammar.text_or_calls(r"/[^{ \t\r\n](.|\n)*/", calls)


DIALECT = Dialect(
    name="llama3_json",
    read=_read,
    grammar=_grammar,
    begins=_begins,
    marks=((_TAG,), ("Environment: ipython",)),
    special_tokens=True,
)
