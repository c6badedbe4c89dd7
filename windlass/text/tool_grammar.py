"""Structured outputs of tool calls: where a model must call, and where it may."""

from __future__ import annotations

import json

from windlass.core.structured import StructuredOutputs
from windlass.text.parsing.call_grammar import calls_schema
from windlass.text.parsing.dialect import Dialect
from windlass.text.parsing.output import ToolSet


def required_calls(tools: ToolSet) -> StructuredOutputs:
    """The structured output of required calls: a JSON array of them."""
    return StructuredOutputs(json=calls_schema(tools.schemas, tools.max_calls), source="tools")


def optional_calls(
    tools: ToolSet, dialect: Dialect, answer: StructuredOutputs | None = None
) -> StructuredOutputs:
    """The structured output of calls as a dialect writes them, or of an answer of a given format.

    Without a format, calls and text may be mixed. Strict tools follow their schemas.
    """
    schemas = {
        name: schema if name in tools.strict else {} for name, schema in tools.schemas.items()
    }
    calls = {"dialect": dialect.name, "tools": schemas, "max_calls": tools.max_calls}
    sources = ["tools"] if tools.strict else []
    if answer is not None:
        calls["answer"] = answer.fields()
        sources.append(answer.source)
    return StructuredOutputs(calls=json.dumps(calls), source=" or ".join(sources))
