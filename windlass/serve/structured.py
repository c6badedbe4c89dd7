"""Reads structured outputs from a body: OpenAI's `response_format`, and the fields of other servers.

Sizes are checked here, before any parsing. The engine compiles the grammar and reports its errors.
"""

from __future__ import annotations

from typing import Any

import msgspec

from windlass.core.structured import StructuredOutputs
from windlass.errors import RequestError
from windlass.serve import body_limits as limits
from windlass.serve.abbreviate import abbreviate
from windlass.serve.json_body import decode
from windlass.serve.protocol import GenerationRequest

# Fields of other servers, and their names in `structured_outputs`: of older versions of vLLM; of llama-server
# and SGLang, where an empty text has no effect.
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_TOP_LEVEL = {"json_schema": "json", "grammar": "grammar", "ebnf": "grammar", "regex": "regex"}
_OTHER_NAMES = _GUIDED | _TOP_LEVEL
_FIELDS = ("response_format", "structured_outputs", *_OTHER_NAMES)


def structured_of(body: GenerationRequest) -> StructuredOutputs | None:
    """The structured outputs of a body, if any. Two fields that set them are an error."""
    given = [name for name in _FIELDS if getattr(body, name) is not None]
    given = [name for name in given if name not in _TOP_LEVEL or getattr(body, name) != ""]
    if body.response_format == {"type": "text"}:
        given.remove("response_format")
    if not given:
        return None
    if len(given) > 1:
        raise RequestError(
            f"{' and '.join(given)} both set the format of the output. Send one.", given[1]
        )
    name = given[0]
    value = getattr(body, name)
    try:
        if name == "response_format":
            fields = _response_format(value)
        else:
            fields = value if name == "structured_outputs" else {_OTHER_NAMES[name]: value}
        fields = _within_limits(fields)
    except RequestError as error:
        raise RequestError(f"{name}: {error}", name) from error
    return StructuredOutputs.of(fields, source=name)


def _response_format(value: dict[str, Any]) -> dict[str, Any]:
    kind = value.get("type")
    if kind not in ("json_object", "json_schema"):
        raise RequestError(
            f"type must be 'text', 'json_object' or 'json_schema', got {abbreviate(kind)}."
        )
    schema = value.get("json_schema")
    if schema is None and value.get("schema") is not None:
        schema = value  # llama.cpp and hosted models have the schema beside the type
    elif kind == "json_object" and schema is None:
        return {"json_object": True}
    if not isinstance(schema, dict) or "schema" not in schema:
        raise RequestError('json_schema must be an object such as {"name": "…", "schema": {…}}.')
    return {"json": schema["schema"]}


def _within_limits(fields: dict[str, Any]) -> dict[str, Any]:
    """Check the sizes of `fields`, and decode a schema that came as text."""
    for value in fields.values():
        if isinstance(value, str):
            _check_chars(len(value))
        elif isinstance(value, dict):
            _check_chars(len(msgspec.json.encode(value)))
        elif isinstance(value, list):
            if len(value) > limits.MAX_CHOICES:
                raise RequestError(
                    f"it has {len(value):,} choices; at most {limits.MAX_CHOICES:,} are accepted."
                )
            _check_chars(sum(len(text) for text in value if isinstance(text, str)))
    grammar, schema = fields.get("grammar"), fields.get("json")
    if isinstance(grammar, str) and grammar.count("::=") > limits.MAX_GBNF_RULES:
        raise RequestError(
            f"the GBNF grammar has {grammar.count('::='):,} rules; at most "
            f"{limits.MAX_GBNF_RULES:,} are accepted. Lark's notation has no such limit."
        )
    if isinstance(schema, str):
        return {**fields, "json": decode(schema.encode(), "the JSON schema")}
    return fields


def _check_chars(count: int) -> None:
    if count > limits.MAX_FORM_CHARS:
        raise RequestError(
            f"it has {count:,} characters; at most {limits.MAX_FORM_CHARS:,} are accepted."
        )
