"""DeepSeek V3, R1 and V3.1: calls between special tokens, with the name before the JSON arguments."""

from __future__ import annotations

from windlass.text.parsing.call_grammar import CallGrammar, literal
from windlass.text.parsing.dialect import Dialect, begins_with
from windlass.text.parsing.output import OutputSink
from windlass.text.parsing.reader import Reader, Steps

_ALL, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_ONE, _ONE_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"


def _read(reader: Reader, out: OutputSink) -> Steps[None]:
    while (yield from reader.until(_ALL, sink=out.content)) is not None:
        while (yield from reader.until(_ONE, _ALL_END)) == _ONE:
            yield from _call(reader, out)


def _call(reader: Reader, out: OutputSink) -> Steps[None]:
    head: list[str] = []
    if (yield from reader.until(_SEPARATOR, sink=head.append)) is None:
        return
    name = "".join(head).strip()
    yield from reader.spaces()
    if (yield from reader.peek()) != "{":
        # V3 and R1 write a kind before the separator, and then the name and fenced JSON.
        name = (yield from reader.word(r"[^\n`]")).strip()
        yield from reader.spaces()
        yield from reader.skip("```json")
        yield from reader.spaces()
    call = out.start_call(name)
    if (yield from reader.peek()) == "{":
        yield from reader.json_value(call.arguments)
    yield from reader.until(_ONE_END)
    if not call.has_arguments:
        call.arguments("{}")


def _grammar(grammar: CallGrammar) -> str:
    one, separator, end = (grammar.mark(text) for text in (_ONE, _SEPARATOR, _ONE_END))
    calls = []
    for name in grammar.tools:
        arguments = grammar.arguments(name)
        fence = literal(f"{name}\n```json\n")
        calls.append(f"{literal(name)} {separator} {arguments} {end}")
        calls.append(f'"function" {separator} {fence} {arguments} "\\n```" {end}')
    grammar.add("one", f"{one} ({' | '.join(calls)})")
    several = "one" if grammar.max_calls is not None else "one (SPACE? one)*"
    return grammar.text_with_calls(_ALL, f"{several} {grammar.mark(_ALL_END)}", repeats=False)


DIALECT = Dialect(
    name="deepseek",
    read=_read,
    grammar=_grammar,
    begins=begins_with(_ALL),
    marks=((_ALL,),),
    special_tokens=True,
)
