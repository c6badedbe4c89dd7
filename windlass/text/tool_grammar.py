"""Grammars of tool calls: what a model may write where it must call, or where it begins a call."""

from __future__ import annotations

from typing import Any

from windlass.core.structured import StructuredOutputs
from windlass.text.parsing.output import ToolSet

_ANY_OBJECT = {"type": "object"}


def required_calls(tools: ToolSet) -> StructuredOutputs:
    """The structured output of required calls: a JSON array of them."""
    definitions: dict[str, Any] = {}
    calls = []
    for i, (name, schema) in enumerate(tools.schemas.items()):
        definitions[f"tool{i}"] = _with_refs(schema or _ANY_OBJECT, f"#/$defs/tool{i}")
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    "arguments": {"$ref": f"#/$defs/tool{i}"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    items = {"anyOf": calls} if len(calls) > 1 else calls[0]
    array: dict[str, Any] = {"type": "array", "items": items, "minItems": 1}
    if tools.max_calls is not None:
        array["maxItems"] = tools.max_calls
    return StructuredOutputs(json={**array, "$defs": definitions}, source="tools")


def _with_refs(schema: Any, root: str) -> Any:
    """A copy of a schema that is moved to `root`: references to its own parts are moved along."""
    if isinstance(schema, list):
        return [_with_refs(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _with_refs(value, root) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved
