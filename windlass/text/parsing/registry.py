"""The dialects of tool calls and the tags of reasoning, and the choice from a chat template."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.core.card import Choice
from windlass.errors import ConfigError
from windlass.text.parsing import (
    deepseek,
    harmony,
    hermes,
    json_calls,
    llama,
    mistral,
    pythonic,
    tagged,
)
from windlass.text.parsing.dialect import Dialect
from windlass.text.parsing.reasoning import TAGS, ReasoningTags

# The first whose marks a chat template contains: those with more marks come first.
DIALECTS = {
    dialect.name: dialect
    for dialect in (
        harmony.DIALECT,
        deepseek.DIALECT,
        tagged.QWEN,
        tagged.GLM,
        hermes.GRANITE,
        mistral.DIALECT,
        hermes.DIALECT,
        pythonic.DIALECT,
        llama.DIALECT,
        json_calls.DIALECT,
    )
}
AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How a model writes reasoning and tool calls."""

    dialect: Dialect
    reasoning: ReasoningTags | None
    choices: tuple[Choice, ...] = ()


def choose_format(template: str, tool_call_parser: str, reasoning_parser: str) -> OutputFormat:
    """Choose parsers for a chat template; "auto" looks for the marks of each in its text."""
    dialect, why = _dialect(template, tool_call_parser)
    reasoning, why_reasoning = _reasoning(template, reasoning_parser, dialect)
    name = reasoning.name if reasoning is not None else NONE
    if reasoning is None and dialect.reasoning is not None:
        name = dialect.name
    choices = (
        Choice("tool calls", dialect.name, why),
        Choice("reasoning", name, why_reasoning),
    )
    return OutputFormat(dialect, reasoning, choices)


def _dialect(template: str, requested: str) -> tuple[Dialect, str]:
    if requested != AUTO:
        if requested not in DIALECTS:
            raise ConfigError(
                f"--tool-call-parser {requested!r} is unknown. Known: {', '.join((AUTO, *DIALECTS))}."
            )
        return DIALECTS[requested], "as set"
    for dialect in DIALECTS.values():
        for marks in dialect.marks:
            if all(mark in template for mark in marks):
                return dialect, f"the chat template contains {' and '.join(marks)}"
    return json_calls.DIALECT, "the chat template has no known marks of tool calls"


def _reasoning(template: str, requested: str, dialect: Dialect) -> tuple[ReasoningTags | None, str]:
    if requested == NONE:
        return None, "as set"
    if requested != AUTO:
        if requested not in TAGS:
            raise ConfigError(
                f"--reasoning-parser {requested!r} is unknown. Known: {', '.join((AUTO, NONE, *TAGS))}."
            )
        return TAGS[requested], "as set"
    if dialect.reasoning is not None:
        return None, "reasoning has its own channel"
    for tags in TAGS.values():
        if tags.end in template or tags.start in template:
            return tags, f"the chat template contains {tags.start}"
    return None, "the chat template has no tags of reasoning"
