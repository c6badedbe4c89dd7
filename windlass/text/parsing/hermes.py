"""Hermes, Qwen 2.5 and 3, Granite 4: <tool_call>{"name": "…", "arguments": {…}}</tool_call>.

Granite 3 writes an array after its marker, which has no end.
"""

from __future__ import annotations

from windlass.text.parsing.dialect import Dialect, Read
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


DIALECT = Dialect(
    name="hermes", read=_reads("<tool_call>", "</tool_call>"), marks=(("<tool_call>",),)
)
GRANITE = Dialect(
    name="granite",
    read=_reads("<|tool_call|>", "<|end_of_text|>"),
    marks=(("<|tool_call|>",),),
    special_tokens=True,
)
