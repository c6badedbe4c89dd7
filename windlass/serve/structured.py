"""The form that a client asks for: OpenAI's `response_format`, and the names of other servers.

Sizes are checked here before anything is parsed. The engine compiles the form, and refuses what is
wrong with it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from windlass.core.structured import StructuredOutputs
from windlass.errors import RequestError
from windlass.serve import body_limits as limits
from windlass.serve.abbreviate import abbreviate
from windlass.serve.json_body import decode
from windlass.serve.protocol import Generation

# Older names of other servers, and what they are in `structured_outputs`.
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_FIELDS = ("response_format", "structured_outputs", *_GUIDED)


def structured_of(body: Generation) -> StructuredOutputs | None:
    """The form that a request asks for; asking twice is refused."""
    asked = [name for name in _FIELDS if getattr(body, name) is not None]
    if body.response_format == {"type": "text"}:
        asked.remove("response_format")
    if not asked:
        return None
    if len(asked) > 1:
        raise RequestError(
            f"{' and '.join(asked)} both say what form to write in. Send one.", asked[1]
        )
    name = asked[0]
    value = getattr(body, name)
    try:
        if name == "response_format":
            fields = _response_format(value)
        else:
            fields = value if name == "structured_outputs" else {_GUIDED[name]: value}
        fields = _within_limits(fields)
    except RequestError as error:
        raise RequestError(f"{name}: {error}", name) from error
    return StructuredOutputs.of(fields, source=name)


def _response_format(asked: dict[str, Any]) -> dict[str, Any]:
    kind = asked.get("type")
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        raise RequestError(
            f"type must be 'text', 'json_object' or 'json_schema', got {abbreviate(kind)}."
        )
    form = asked.get("json_schema")
    if not isinstance(form, dict) or "schema" not in form:
        raise RequestError('json_schema must be an object such as {"name": "…", "schema": {…}}.')
    return {"json": form["schema"]}


def _within_limits(form: dict[str, Any]) -> dict[str, Any]:
    """`form`, a schema that came as text decoded. Refuses what would take long to read."""
    for value in form.values():
        if isinstance(value, str):
            _check_chars(len(value))
        elif isinstance(value, dict):
            _check_chars(len(msgspec.json.encode(value)))
        elif isinstance(value, list):
            if len(value) > limits.MAX_CHOICES:
                raise RequestError(
                    f"it has {len(value):,} choices; at most {limits.MAX_CHOICES:,} are read."
                )
            _check_chars(sum(len(text) for text in value if isinstance(text, str)))
    grammar, schema = form.get("grammar"), form.get("json")
    if isinstance(grammar, str) and grammar.count("::=") > limits.MAX_GBNF_RULES:
        raise RequestError(
            f"the GBNF grammar has {grammar.count('::='):,} rules; at most "
            f"{limits.MAX_GBNF_RULES:,} are read. Lark's notation has no such limit."
        )
    if isinstance(schema, str):
        return {**form, "json": decode(schema.encode(), "the JSON schema")}
    return form


def _check_chars(count: int) -> None:
    if count > limits.MAX_FORM_CHARS:
        raise RequestError(
            f"it has {count:,} characters, at most {limits.MAX_FORM_CHARS:,} are read."
        )
