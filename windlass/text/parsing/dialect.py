"""A dialect: how a family of models writes tool calls into its text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from windlass.text.parsing.call_grammar import CallGrammar
from windlass.text.parsing.output import OutputSink, call_id
from windlass.text.parsing.reader import Reader, Steps
from windlass.text.parsing.reasoning import ReasoningTags

Read = Callable[[Reader, OutputSink], Steps[None]]
WriteGrammar = Callable[[CallGrammar], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """A tool-call parser.

    read: reads a whole output after its reasoning.
    grammar: writes the grammar of such outputs, whose calls follow the tools' schemas.
    marks: a chat template that contains all strings of one of these tuples teaches the dialect.
    special_tokens: whether its markers are special tokens, which are not part of the text otherwise.
    reasoning: the marks of reasoning that `read` finds itself.
    """

    name: str
    read: Read
    grammar: WriteGrammar
    marks: tuple[tuple[str, ...], ...] = ()
    special_tokens: bool = False
    reasoning: ReasoningTags | None = None
    make_id: Callable[[], str] = call_id
