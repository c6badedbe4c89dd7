"""What a client says of an answer's form: OpenAI's `response_format`, and the names of other servers."""

from __future__ import annotations

from typing import Any

from windlass.core.structured import StructuredOutputs
from windlass.errors import RequestError
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
            form = _response_format(value)
        else:
            named = value if name == "structured_outputs" else {_GUIDED[name]: value}
            form = StructuredOutputs.of(named)
        form.check()
        return form
    except RequestError as error:
        raise RequestError(f"{name}: {error}", name) from error


def _response_format(asked: dict[str, Any]) -> StructuredOutputs:
    kind = asked.get("type")
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    if kind != "json_schema":
        raise RequestError(
            f"type must be 'text', 'json_object' or 'json_schema', got {kind!r:.100}."
        )
    form = asked.get("json_schema")
    if not isinstance(form, dict) or "schema" not in form:
        raise RequestError('json_schema must be an object such as {"name": "…", "schema": {…}}.')
    return StructuredOutputs(json=form["schema"])
