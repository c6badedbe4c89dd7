"""Mistral: [TOOL_CALLS] before an array of calls, or before each name[ARGS]{…}."""

from __future__ import annotations

from windlass.text.parsing.call_grammar import CallGrammar, literal
from windlass.text.parsing.dialect import Dialect, begins_with
from windlass.text.parsing.json_calls import read_calls
from windlass.text.parsing.output import OutputSink, short_call_id
from windlass.text.parsing.reader import Reader, Steps

_CALLS, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def _read(reader: Reader, out: OutputSink) -> Steps[None]:
    while (yield from reader.until(_CALLS, sink=out.content)) is not None:
        spaces = yield from reader.spaces()
        if (yield from reader.peek()) in ("[", "{"):
            yield from read_calls(reader, out, before=_CALLS + spaces)
            continue
        name = yield from reader.word(r"[\w.\-]")
        if not name:
            out.content(_CALLS + spaces)
            continue
        id_ = None
        if (yield from reader.skip(_ID)):
            id_ = yield from reader.word(r"\w")
        yield from reader.skip(_ARGS)
        yield from reader.spaces()
        if (yield from reader.peek()) != "{":
            out.content(_CALLS + spaces + name)
            continue
        yield from reader.json_value(out.start_call(name, id_).arguments)


def _grammar(grammar: CallGrammar) -> str:
    if not grammar.is_special(_ARGS):
        return grammar.text_with_calls(_CALLS, f"SPACE? {grammar.calls()}", repeats=False)
    id_ = f"({grammar.mark(_ID)} /[a-zA-Z0-9]{{1,32}}/)? " if grammar.is_special(_ID) else ""
    args = grammar.mark(_ARGS)
    calls = [f"{literal(name)} {id_}{args} {grammar.arguments(name)}" for name in grammar.tools]
    return grammar.text_with_calls(_CALLS, " | ".join(calls))


DIALECT = Dialect(
    name="mistral",
    read=_read,
    grammar=_grammar,
    begins=begins_with(_CALLS),
    marks=((_CALLS,),),
    special_tokens=True,
    make_id=short_call_id,
)
