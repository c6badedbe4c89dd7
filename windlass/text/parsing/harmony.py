"""gpt-oss: messages on channels. Analysis is reasoning, a message to a function is a call."""

from __future__ import annotations

import re

from windlass.text.parsing.call_grammar import ANSWER_RULE, CallGrammar, literal
from windlass.text.parsing.dialect import Dialect
from windlass.text.parsing.output import OutputSink, ToolSet
from windlass.text.parsing.reader import Reader, Steps
from windlass.text.parsing.reasoning import ReasoningTags

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
_CONSTRAIN = "<|constrain|>"
_RECIPIENT = re.compile(r"to=functions\.([\w.\-]+)")


def _read(reader: Reader, out: OutputSink) -> Steps[None]:
    end: str | None = None
    while (yield from reader.peek()):
        if end != _START and not (yield from _is_header(reader)):
            # A continued message has no header.
            end = yield from reader.until(*_ENDS, sink=out.content)
            continue
        head: list[str] = []
        if (yield from reader.until(_MESSAGE, sink=head.append)) is None:
            return
        end = yield from _message("".join(head), reader, out)


def _is_header(reader: Reader) -> Steps[bool]:
    if (yield from reader.peek(len(_CHANNEL))) == _CHANNEL:
        return True
    recipient = " to=functions."
    return (yield from reader.peek(len(recipient))) == recipient or (yield from reader.skip(_START))


def _message(head: str, reader: Reader, out: OutputSink) -> Steps[str | None]:
    recipient = _RECIPIENT.search(head)
    if recipient is not None:
        call = out.start_call(recipient[1])
        end = yield from reader.until(*_ENDS, sink=call.arguments)
        if not call.has_arguments:
            call.arguments("{}")
        return end
    is_analysis = f"{_CHANNEL}analysis" in head
    return (yield from reader.until(*_ENDS, sink=out.reasoning if is_analysis else out.content))


def _begins(reader: Reader, tools: ToolSet) -> Steps[bool]:
    """Messages name their channel, so that an answer is never taken for a call."""
    del reader, tools
    yield from ()
    return True


def _grammar(grammar: CallGrammar) -> str:
    channel, message = grammar.mark(_CHANNEL), grammar.mark(_MESSAGE)
    before_type = "SPACE"  # without it, the type would be part of the function's name
    if grammar.is_special(_CONSTRAIN):
        before_type = f"(SPACE | SPACE? {grammar.mark(_CONSTRAIN)})"
    json = f'({before_type} "json" | SPACE)?'
    calls = []
    for name in grammar.tools:
        arguments = f"{json} {message} {grammar.arguments(name)}"
        on_channel = literal(f"commentary to=functions.{name}")
        calls.append(f"{channel} {on_channel} {arguments}")
        to_role = literal(f" to=functions.{name}")
        calls.append(f'{to_role} {channel} "commentary" {arguments}')
    grammar.add("call", " | ".join(calls))
    final = f'{channel} "final" {message} TEXT'
    if grammar.has_answer:
        final = f'{channel} "final" {json} {message} {ANSWER_RULE}'
    grammar.add("aside", f'{channel} ("analysis" | "commentary") {message} TEXT')
    again = f'{grammar.mark("<|end|>")} {grammar.mark(_START)} "assistant"'
    last = f"call | {final}" if grammar.has_answer else f"aside | call | {final}"
    if grammar.must_call:
        last = "call"
    return grammar.whole(f"(aside {again})* ({last})")


DIALECT = Dialect(
    name="harmony",
    read=_read,
    grammar=_grammar,
    begins=_begins,
    marks=((_CHANNEL, _MESSAGE),),
    special_tokens=True,
    reasoning=ReasoningTags(
        "harmony",
        start="",
        end=f"{_CHANNEL}final{_MESSAGE}",
        closing=f"<|end|>{_START}assistant{_CHANNEL}final{_MESSAGE}",
        answer_ends=tuple(
            f"{_CHANNEL}final{kind}{_MESSAGE}"
            for kind in (" json", f"{_CONSTRAIN}json", f" {_CONSTRAIN}json")
        ),
        other_ends=(f"{_CHANNEL}commentary",),
        special_tokens=True,
    ),
)
