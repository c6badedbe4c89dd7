"""Structured outputs of tool calls: where a model must call, and where it may."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from windlass.core.structured import StructuredOutputs
from windlass.text.parsing.call_grammar import calls_schema
from windlass.text.parsing.dialect import Dialect
from windlass.text.parsing.output import ToolSet


def required_calls(tools: ToolSet) -> StructuredOutputs:
    """The structured output of required calls: a JSON array of them."""
    return StructuredOutputs(json=calls_schema(tools.schemas, tools.max_calls), source="tools")


def required_dialect_calls(tools: ToolSet, dialect: Dialect) -> StructuredOutputs:
    """The structured output of required calls as a dialect writes them."""
    calls = _fields(tools, dialect, tools.schemas) | {"must_call": True}
    return StructuredOutputs(calls=json.dumps(calls), source="tools")


def optional_calls(
    tools: ToolSet, dialect: Dialect, answer: StructuredOutputs | None = None
) -> StructuredOutputs:
    """The structured output of calls as a dialect writes them, or of an answer of a given format.

    Without a format, calls and text may be mixed. Strict tools follow their schemas.
    """
    schemas = {
        name: schema if name in tools.strict else {} for name, schema in tools.schemas.items()
    }
    calls = _fields(tools, dialect, schemas)
    sources = ["tools"] if tools.strict or answer is None else []
    if answer is not None:
        calls["answer"] = answer.fields()
        sources.append(answer.source)
    return StructuredOutputs(calls=json.dumps(calls), source=" or ".join(sources))


def _fields(tools: ToolSet, dialect: Dialect, schemas: Mapping[str, Any]) -> dict[str, Any]:
    """What text/grammar/translate.py reads."""
    return {"dialect": dialect.name, "tools": dict(schemas), "max_calls": tools.max_calls}
