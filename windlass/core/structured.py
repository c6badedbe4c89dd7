"""Constraints on outputs: a JSON schema, a regular expression, a choice, or a grammar.

This module makes only cheap checks. Compiling a grammar can take minutes and gigabytes, so the
sandbox of text/grammar/ does it and reports errors in the grammar.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from windlass.errors import RequestError

_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_ALL_KINDS = (*_KINDS, "calls")
MAX_CHARS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """Exactly one constraint. The field names are those of vLLM.

    Usage: `SamplingParams(structured_outputs=StructuredOutputs(json={"type": "object", …}))`.
    """

    json: str | dict[str, Any] | bool | None = None  # a schema; kept as text
    json_object: bool = False  # any object
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None  # Lark's notation, or GBNF
    calls: str | None = (
        None  # tool calls, as text/tool_grammar.py writes them; no client can set it
    )
    # The request's field that it came from. Errors name it; no client can set it.
    source: str = field(default="structured_outputs", compare=False)

    def __post_init__(self) -> None:
        given = [name for name in _ALL_KINDS if getattr(self, name) not in (None, False)]
        if not isinstance(self.json_object, bool):
            raise self.error(f"json_object must be true or false, got {_shown(self.json_object)}.")
        if self.json is False:
            raise self.error("the JSON schema is false, which nothing satisfies.")
        if len(given) != 1:
            listed = ", ".join(given) or "none"
            raise self.error(f"give exactly one of {', '.join(_KINDS)}; got {listed}.")
        if self.json is not None:
            object.__setattr__(self, "json", self._schema_text(self.json))
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text):
                raise self.error(f"{name} must be a non-empty string, got {_shown(text)}.")
        if self.choice is not None:
            object.__setattr__(self, "choice", self._choices(self.choice))
        num_chars = sum(map(len, (self.text, *(self.choice or ()))))
        if num_chars > MAX_CHARS:
            raise self.error(
                f"it has {num_chars:,} characters, at most {MAX_CHARS:,} are accepted."
            )

    @classmethod
    def of(cls, fields: Mapping[str, Any], source: str = "structured_outputs") -> StructuredOutputs:
        """Make a constraint from the fields that a client sent in `source`."""
        unknown = [name for name in fields if name not in _KINDS]
        if unknown:
            known = ", ".join(_KINDS)
            raise RequestError(
                f"{source}: {_shown(unknown[0])} is not a kind of structured output. Known: {known}.",
                source,
            )
        return cls(**fields, source=source)

    @property
    def text(self) -> str:
        """The schema, expression or grammar as the client wrote it; "" for the other kinds."""
        return str(self.json or self.regex or self.grammar or self.calls or "")

    def fields(self) -> dict[str, Any]:
        """The constraint as fields."""
        return {name: value for name in _ALL_KINDS if (value := getattr(self, name))}

    def error(self, reason: str) -> RequestError:
        """The error for this constraint, with the request field that it came from."""
        return RequestError(f"{self.source}: {reason}", self.source)

    def _schema_text(self, schema: object) -> str:
        if isinstance(schema, str) and len(schema) > MAX_CHARS:
            return schema  # rejected later for its length, without parsing
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(parsed, (Mapping, bool)):
                raise self.error(f"a JSON schema is an object, got {_shown(parsed)}.")
            return schema if isinstance(schema, str) else json.dumps(schema)
        except RecursionError as error:
            raise self.error("the JSON schema is nested too deeply.") from error
        except (TypeError, ValueError) as error:
            raise self.error(f"the JSON schema is not JSON: {error}.") from error

    def _choices(self, choice: object) -> tuple[str, ...]:
        texts = isinstance(choice, Sequence) and not isinstance(choice, str) and tuple(choice)
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise self.error(f"choice must be a list of non-empty strings, got {_shown(choice)}.")
        return texts


def _shown(value: object) -> str:
    """Format a value for an error message, with limited length and depth."""
    return reprlib.repr(value)
