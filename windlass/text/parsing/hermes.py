"""Hermes, Qwen 2.5 and 3, Granite 4: <tool_call>{"name": "…", "arguments": {…}}</tool_call>.

Granite 3 writes an array after its marker, which has no end.
"""

from __future__ import annotations

from windlass.text.parsing.call_grammar import CallGrammar
from windlass.text.parsing.dialect import Dialect, Read, begins_with
from windlass.text.parsing.json_calls import read_calls
from windlass.text.parsing.output import OutputSink
from windlass.text.parsing.reader import Reader, Steps


def _reads(start: str, end: str) -> Read:
    def read(reader: Reader, out: OutputSink) -> Steps[None]:
        while (yield from reader.until(start, sink=out.content)) is not None:
            spaces = yield from reader.spaces()
            if (yield from reader.peek()) not in ("{", "["):
                out.content(start + spaces)
                continue
            if (yield from read_calls(reader, out, before=start + spaces)):
                yield from reader.spaces()
                yield from reader.skip(end)

    return read


def _hermes_grammar(grammar: CallGrammar) -> str:
    end = grammar.mark("</tool_call>")
    return grammar.text_with_calls("<tool_call>", f"SPACE? {grammar.call()} SPACE? {end}")


def _granite_grammar(grammar: CallGrammar) -> str:
    return grammar.text_with_calls("<|tool_call|>", f"SPACE? {grammar.calls()}", repeats=False)


DIALECT = Dialect(
    name="hermes",
    read=_reads("<tool_call>", "</tool_call>"),
    grammar=_hermes_grammar,
    begins=begins_with("<tool_call>"),
    marks=(("<tool_call>",),),
)
GRANITE = Dialect(
    name="granite",
    read=_reads("<|tool_call|>", "<|end_of_text|>"),
    grammar=_granite_grammar,
    begins=begins_with("<|tool_call|>"),
    marks=(("<|tool_call|>",),),
    special_tokens=True,
)
