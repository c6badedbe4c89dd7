"""Writes grammars of tool calls in llguidance's Lark notation: free text until a call begins, then its schema.

Beside an answer that has a grammar of its own, there is no free text: the output is that answer, or calls.

Each dialect says where its calls begin and how they are written; this module has the parts they share.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

Schema = Mapping[str, Any]

ANSWER = "answer"  # name of the grammar of the answer
ANSWER_RULE = f"@{ANSWER}"
_ANY_OBJECT = {"type": "object"}
_TERMINALS = r"""
TEXT: /(.|\n)*/
SPACE: /[ \t\r\n]{1,20}/
"""


class CallGrammar:
    """The tools of one request, and the rules of the grammar so far."""

    def __init__(
        self,
        tools: Mapping[str, Schema],
        *,
        max_calls: int | None,
        special_ids: Mapping[str, int],
        adapt: Callable[[Schema], Schema],
        json_options: Mapping[str, Any],
        has_answer: bool = False,
        must_call: bool = False,
    ) -> None:
        """`special_ids`: ids of special tokens, which match no text. `adapt` prepares a schema, which is
        compiled with `json_options`. `has_answer`: an output without calls matches `ANSWER_RULE`. `must_call`: there
        is none without calls; only of dialects with their own reasoning, others write a JSON array then.
        """
        self.tools = tools
        self.max_calls = max_calls
        self.has_answer = has_answer
        self.must_call = must_call
        self._special_ids = special_ids
        self._adapt = adapt
        self._json_options = json_options
        self._rules: list[str] = []

    def is_special(self, text: str) -> bool:
        return text in self._special_ids

    def mark(self, text: str) -> str:
        """A marker: a special token, or its text."""
        return f"<[{self._special_ids[text]}]>" if self.is_special(text) else literal(text)

    def add(self, name: str, body: str, option: str = "") -> str:
        """Add a rule; returns its name."""
        self._rules.append(f"{name}{option}: {body}")
        return name

    def until(self, name: str, marker: str) -> str:
        """Add a rule for free text and the marker that ends it."""
        # A lazy lexeme ends where its marker does; special tokens are not part of lexemes.
        option = "" if self.is_special(marker) else "[lazy]"
        return self.add(name, f"TEXT {self.mark(marker)}", option)

    # ---- JSON --------------------------------------------------------------------------------

    def json(self, schema: Schema, *, compact: bool = False) -> str:
        """A JSON value; `compact`: without spaces."""
        options = {"whitespace_flexible": False} if compact else self._json_options
        return f"%json {json.dumps({**self._adapt(schema), 'x-guidance': options})}"

    def arguments(self, name: str) -> str:
        """The arguments of one tool."""
        return self.json(self.tools[name] or _ANY_OBJECT)

    def call(self, arguments: str = "arguments") -> str:
        """A call of any tool as an object, with its arguments under this key."""
        return self.json(_call_schema(self.tools, arguments))

    def calls(self) -> str:
        """An array of calls."""
        return self.json(calls_schema(self.tools, self.max_calls))

    # ---- outputs -----------------------------------------------------------------------------

    def text_with_calls(
        self, marker: str, call: str, *, repeats: bool = True, before: str = ""
    ) -> str:
        """The grammar of text in which calls begin with a marker. `repeats`: others may follow.

        `before`: what may stand before the marker where text may not.
        """
        self.add("call", call)
        repeats = repeats and self.max_calls is None
        if self.has_answer:
            each = f"{before}{self.mark(marker)} call"
            return self.text_or_calls("", f"{each} (SPACE? {each})*" if repeats else each)
        self.until("head", marker)
        return self.whole("(head call)* TEXT" if repeats else "TEXT | head call SPACE?")

    def text_or_calls(self, text: str, calls: str) -> str:
        """The grammar of an output that is calls, or else the answer; without one, text of this pattern."""
        if self.has_answer:
            return self.whole(f"{ANSWER_RULE} | SPACE? ({calls}) SPACE?")
        self.add("OTHER", text)
        return self.whole(f"SPACE? (OTHER | ({calls}) SPACE?)?")

    def whole(self, start: str) -> str:
        """The grammar of a whole output."""
        return "\n".join([f"start: {start}", *self._rules]) + _TERMINALS


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def calls_schema(tools: Mapping[str, Schema], max_calls: int | None) -> dict[str, Any]:
    """The schema of an array of calls."""
    items = _call_schema(tools, "arguments")
    array = {"type": "array", "$defs": items.pop("$defs"), "items": items, "minItems": 1}
    return array if max_calls is None else {**array, "maxItems": max_calls}


def _call_schema(tools: Mapping[str, Schema], arguments: str) -> dict[str, Any]:
    definitions, calls = {}, []
    for i, (name, schema) in enumerate(tools.items()):
        definitions[f"tool{i}"] = _with_refs(schema or _ANY_OBJECT, f"#/$defs/tool{i}")
        properties = {"name": {"const": name}, arguments: {"$ref": f"#/$defs/tool{i}"}}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls, "$defs": definitions}


def _with_refs(schema: Any, root: str) -> Any:
    """A copy of a schema that is moved to `root`: references to its own parts are moved along."""
    if isinstance(schema, list):
        return [_with_refs(item, root) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _with_refs(value, root) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved


def definitions(schema: Schema) -> dict[str, Any]:
    """What the references in a schema's parts may name."""
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def local_reference(root: Schema, schema: Any) -> Any:
    """The schema itself, or what its reference into `root` names; None: nothing."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    found: Any = root
    for part in reference[2:].split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
