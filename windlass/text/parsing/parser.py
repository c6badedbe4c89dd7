"""Parses one output while it is generated."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.text.parsing.dialect import Dialect
from windlass.text.parsing.output import Event, OutputSink, ParsedMessage, ToolSet, call_id
from windlass.text.parsing.reader import Reader, Steps
from windlass.text.parsing.reasoning import ReasoningTags


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsingOptions:
    """What to look for in an output.

    dialect: None: tool calls are not parsed. reasoning: None: all is content, unless the dialect
    finds reasoning itself. in_reasoning: the prompt has opened the reasoning.
    """

    dialect: Dialect | None = None
    tools: ToolSet | None = None
    reasoning: ReasoningTags | None = None
    in_reasoning: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether all output is content."""
        return self.dialect is None and self.reasoning is None

    @property
    def special_tokens(self) -> bool:
        """Whether special tokens must be part of the text."""
        return any(
            each is not None and each.special_tokens for each in (self.dialect, self.reasoning)
        )


class OutputParser:
    """Turns text into events; the events do not depend on how the text is cut."""

    def __init__(self, options: ParsingOptions) -> None:
        self._options = options
        self._reader = Reader()
        make_id = call_id if options.dialect is None else options.dialect.make_id
        self._out = OutputSink(options.tools, make_id)
        self._steps = self._read()

    @property
    def num_calls(self) -> int:
        return self._out.num_calls

    @property
    def reasoning(self) -> str:
        """All reasoning so far."""
        return self._out.all_reasoning

    def _read(self) -> Steps[None]:
        options = self._options
        if options.reasoning is not None:
            yield from options.reasoning.read(self._reader, self._out, is_open=options.in_reasoning)
        if options.dialect is not None and (yield from self._may_call(options.dialect)):
            yield from options.dialect.read(self._reader, self._out)
        yield from self._reader.rest(self._out.content)

    def _may_call(self, dialect: Dialect) -> Steps[bool]:
        """Whether to look for calls. An answer of a given format may contain anything, but begins with none."""
        if not self._out.tools.beside_answer:
            return True
        with self._reader.ahead():
            yield from self._reader.spaces()
            return (yield from dialect.begins(self._reader, self._out.tools))

    def feed(self, text: str, last: bool = False) -> list[Event]:
        """Add text; `last`: none follows."""
        self._reader.push(text)
        if last:
            self._reader.end()
        for _ in self._steps:
            break
        if last:
            self._out.end()
        return self._out.take()


def parse(text: str, options: ParsingOptions) -> ParsedMessage:
    """Parse a whole output."""
    message = ParsedMessage()
    message.add(OutputParser(options).feed(text, last=True))
    return message
