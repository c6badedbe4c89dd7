"""Mistral: [TOOL_CALLS] before an array of calls, or before each name[ARGS]{…}."""

from __future__ import annotations

from windlass.text.parsing.dialect import Dialect
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


DIALECT = Dialect(
    name="mistral",
    read=_read,
    marks=((_CALLS,),),
    special_tokens=True,
    make_id=short_call_id,
)
