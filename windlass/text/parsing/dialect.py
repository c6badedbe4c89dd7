"""A dialect: how a family of models writes tool calls into its text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from windlass.text.parsing.call_grammar import CallGrammar
from windlass.text.parsing.output import OutputSink, ToolSet, call_id
from windlass.text.parsing.reader import Reader, Steps
from windlass.text.parsing.reasoning import ReasoningTags

Begins = Callable[[Reader, ToolSet], Steps[bool]]
Read = Callable[[Reader, OutputSink], Steps[None]]
WriteGrammar = Callable[[CallGrammar], str]


def begins_with(*markers: str) -> Begins:
    """Calls begin with one of these markers."""

    def begins(reader: Reader, tools: ToolSet) -> Steps[bool]:
        del tools
        for marker in markers:
            if (yield from reader.skip(marker)):
                return True
        return False

    return begins


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """A tool-call parser.

    read: reads a whole output after its reasoning.
    grammar: writes the grammar of such outputs, whose calls follow the tools' schemas.
    begins: whether an output begins with a call. An answer of a given format that does not is not read.
    marks: a chat template that contains all strings of one of these tuples teaches the dialect.
    special_tokens: whether its markers are special tokens, which are not part of the text otherwise.
    reasoning: the marks of reasoning that `read` finds itself.
    """

    name: str
    read: Read
    grammar: WriteGrammar
    begins: Begins
    marks: tuple[tuple[str, ...], ...] = ()
    special_tokens: bool = False
    reasoning: ReasoningTags | None = None
    make_id: Callable[[], str] = call_id
