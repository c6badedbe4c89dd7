"""Adapts JSON schemas to what llguidance compiles.

Some keywords that llguidance lacks are rewritten with others; the rest is dropped and named. Formats that
are not known are annotations, as the standard has it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from windlass.core.structured import StructuredOutputs
from windlass.text.parsing.call_grammar import local_reference

Schema = dict[str, Any]

_FORMATS = frozenset(
    {
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "time",
        "uri",
        "uuid",
    }
)
# Where schemas are inside of a schema; all other keywords have values.
_SCHEMAS = ("additionalItems", "additionalProperties", "items")
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_COMBINATIONS = ("allOf", "anyOf", "oneOf")
_DEPENDENCIES = ("dependentRequired", "dependentSchemas", "dependencies")
_MAPS = ("$defs", "definitions", "patternProperties", "properties")
# Keywords that no grammar of llguidance enforces, and those that are part of another.
_UNSUPPORTED = {
    "$dynamicRef": (),
    "$recursiveRef": (),
    "contains": ("minContains", "maxContains"),
    "if": ("then", "else"),
    "not": (),
    "unevaluatedItems": (),
    "unevaluatedProperties": (),
}
# Have no effect alone.
_INERT = ("$dynamicAnchor", "$recursiveAnchor", "minContains", "maxContains", "then", "else")
_MAX_NOTES, _MAX_PATH_CHARS = 64, 200  # of what is not enforced; a client decides both
_UUID = re.compile(r"uuid[1-8]")
_LOOKAROUND = re.compile(r"(?<!\\)\(\?(?:[=!]|<[=!])")
# Begins the pattern of a decimal number that Pydantic writes: the text has a digit.
_HAS_DIGIT = "(?!^[-+.]*$)"


@dataclass(frozen=True, slots=True)
class AdaptedSchema:
    """A schema that llguidance compiles, and what it does not enforce, e.g. "not at #/properties/a".

    Of the latter, the first 64. Schemas of several properties may be one object.
    """

    schema: Schema
    unsupported: tuple[str, ...]


def adapt(schema: Mapping[str, Any]) -> AdaptedSchema:
    """Adapt a schema. Raises RecursionError when it is nested too deeply."""
    adapter = _Adapter(schema)
    return AdaptedSchema(adapter.schema(schema, "#"), tuple(adapter.unsupported))


def unsupported_keywords(structured: StructuredOutputs | None) -> tuple[str, ...]:
    """What a request's JSON schema requires and no grammar enforces."""
    if structured is None or (structured.json is None and structured.calls is None):
        return ()
    try:
        parsed = json.loads(structured.text)
        if structured.calls is None:
            return adapt(parsed).unsupported if isinstance(parsed, dict) else ()
        answer = parsed.get("answer")
        of_answer = () if answer is None else unsupported_keywords(StructuredOutputs(**answer))
        tools = parsed["tools"].items()
        return of_answer + tuple(
            f"{each} of {name}" for name, schema in tools for each in adapt(schema).unsupported
        )
    except RecursionError:
        return ()  # the sandbox refuses it


class _Adapter:
    """Walks one schema and collects what cannot be enforced."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        # Closing a part of a combination would forbid the properties of the others.
        self._may_close = not _mentions_all_of(root)
        # Results with their schemas, which keeps the ids unique. Listed property names share one schema:
        # adapting it for each name would take exponential time where such schemas are nested.
        self._adapted: dict[tuple[int, bool], tuple[Schema, Schema]] = {}
        self.unsupported: list[str] = []

    def schema(self, given: Any, path: str, is_part: bool = False) -> Any:
        """Adapt one schema; `is_part`: another schema holds for the same value."""
        if not isinstance(given, dict):
            return given
        key = (id(given), is_part)
        if key not in self._adapted:
            self._adapted[key] = (given, self._adapt(given, path, is_part))
        return self._adapted[key][1]

    def _adapt(self, given: Schema, path: str, is_part: bool) -> Schema:
        out = dict(given)
        if self._may_close and not is_part:
            _close(out)
        self._drop(out, path)
        _rewrite_dependencies(out)
        self._names(out, path)
        self._text(out, path)
        self._num_properties(out, path)
        for name, value in out.items():
            at = f"{path}/{_escaped(name)}"
            if name in _MAPS and isinstance(value, dict):
                out[name] = {
                    key: self.schema(each, f"{at}/{_escaped(key)}") for key, each in value.items()
                }
            elif name in _LISTS and isinstance(value, list):
                of_part = name in _COMBINATIONS and (is_part or "properties" in out)
                out[name] = [
                    self.schema(each, f"{at}/{i}", of_part) for i, each in enumerate(value)
                ]
            elif name in _SCHEMAS:
                out[name] = self.schema(value, at)
        return out

    def _note(self, keyword: str, path: str) -> None:
        if len(self.unsupported) < _MAX_NOTES:
            shown = path if len(path) <= _MAX_PATH_CHARS else f"{path[:_MAX_PATH_CHARS]}…"
            self.unsupported.append(f"{keyword} at {shown}")

    def _drop(self, out: Schema, path: str) -> None:
        for name, parts in _UNSUPPORTED.items():
            if name in out:
                self._note(name, path)
                for each in (name, *parts):
                    out.pop(each, None)
        for name in _INERT:
            out.pop(name, None)
        if out.pop("uniqueItems", False):
            self._note("uniqueItems", path)

    def _names(self, out: Schema, path: str) -> None:
        """Rewrite propertyNames where the names are listed, or match a pattern."""
        if "propertyNames" not in out:
            return
        names = local_reference(self._root, out.pop("propertyNames"))
        value = out.get("additionalProperties", True)
        is_open = "properties" not in out and "patternProperties" not in out
        match names:
            case {"enum": [*listed]} if is_open and all(isinstance(name, str) for name in listed):
                out["properties"] = dict.fromkeys(listed, value)
                out["additionalProperties"] = False
            case {"const": str(name)} if is_open:
                out |= {"properties": {name: value}, "additionalProperties": False}
            case {"pattern": str(pattern)} if is_open:
                out |= {"patternProperties": {pattern: value}, "additionalProperties": False}
            case True | {"type": "string"} if names is True or set(names) <= {"type", "title"}:
                pass
            case _:
                self._note("propertyNames", path)

    def _text(self, out: Schema, path: str) -> None:
        form = out.pop("format", None)
        if isinstance(form, str) and _UUID.fullmatch(form):
            out["format"] = "uuid"
        elif isinstance(form, str) and form in _FORMATS:
            out["format"] = form
        pattern = out.pop("pattern", None)
        if isinstance(pattern, str):
            if _LOOKAROUND.search(pattern):
                self._note("pattern with look-around", path)
                pattern = pattern.replace(_HAS_DIGIT, "")
            if not _LOOKAROUND.search(pattern):
                out["pattern"] = ascii_digits(pattern)
        patterns = out.get("patternProperties")
        if isinstance(patterns, dict):
            out["patternProperties"] = {ascii_digits(key): each for key, each in patterns.items()}

    def _num_properties(self, out: Schema, path: str) -> None:
        """Drop counts of properties where some are optional."""
        properties, required = out.get("properties"), out.get("required")
        listed = required if isinstance(required, list) else []
        if isinstance(properties, dict) and not set(properties) <= set(map(str, listed)):
            for name in ("minProperties", "maxProperties"):
                if out.pop(name, None) is not None:
                    self._note(name, path)


def _close(out: Schema) -> None:
    """Allow only the listed properties where a schema does not say otherwise, as other engines do.

    The standard allows any others, and a small model may never stop to invent them.
    """
    others = ("additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties")
    combined = (*_COMBINATIONS, "$ref", "if", *_DEPENDENCIES)
    if out.get("properties") and not any(name in out for name in (*others, *combined)):
        out["additionalProperties"] = False


def _mentions_all_of(value: Any) -> bool:
    if isinstance(value, dict):
        return "allOf" in value or any(map(_mentions_all_of, value.values()))
    return isinstance(value, list) and any(map(_mentions_all_of, value))


def _rewrite_dependencies(out: Schema) -> None:
    """Express dependencies with anyOf: a property is absent, or what depends on it holds."""
    rules = []
    for keyword in _DEPENDENCIES:
        for name, need in _items(out, keyword):
            needed = {"required": need} if isinstance(need, list) else need
            present = {"allOf": [{"required": [name]}, needed]}
            rules.append({"anyOf": [{"properties": {name: False}}, present]})
    if rules:
        given = out.get("allOf")
        out["allOf"] = [*(given if isinstance(given, list) else ()), *rules]


def _items(out: Schema, name: str) -> list[tuple[str, Any]]:
    """Remove a keyword that maps names to values."""
    value = out.pop(name, None)
    return list(value.items()) if isinstance(value, dict) else []


def _escaped(name: str) -> str:
    """A name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def ascii_digits(regex: str) -> str:
    r"""Replace \d by 0-9, its usual meaning; in llguidance it matches the digits of all scripts."""
    out, at, in_class = [], 0, False
    while at < len(regex):
        size = 2 if regex[at] == "\\" else 1
        piece = regex[at : at + size]
        if piece == r"\d":
            piece = "0-9" if in_class else "[0-9]"
        elif piece in "[]":
            in_class = piece == "["
        out.append(piece)
        at += size
    return "".join(out)
