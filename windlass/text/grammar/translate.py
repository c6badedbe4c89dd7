"""Translates structured outputs into the text of an llguidance grammar.

Runs in the sandbox, because a client's input can make the translation slow or its recursion deep.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from windlass.core.structured import StructuredOutputs
from windlass.errors import RequestError

# Between JSON tokens. Without a bound, small models may write whitespace for ever.
_WHITESPACE = r"[ \t\n\r]{0,20}"
_VALUES = ("const", "default", "enum", "examples")  # keywords with values instead of schemas
_ANY_OBJECT = '{"type": "object"}'


def to_llguidance(structured: StructuredOutputs) -> str:
    """Return the grammar's text. Raises RequestError when there is no translation."""
    from llguidance import LLMatcher

    try:
        if structured.json is not None or structured.json_object:
            schema = _ANY_OBJECT if structured.json_object else _with_ascii_digits(structured.text)
            return LLMatcher.grammar_from_json_schema(
                schema, defaults={"whitespace_pattern": _WHITESPACE}
            )
        if structured.regex is not None:
            return LLMatcher.grammar_from_regex(ascii_digits(structured.regex))
        if structured.choice is not None:
            # One terminal: as alternatives of a rule, 2,000 choices would exceed the parser's limit.
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in structured.choice)
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
        assert structured.grammar is not None
        return LLMatcher.grammar_from_lark(_lark(structured.grammar))
    except RecursionError as error:
        raise RequestError("it is nested too deeply.", structured.source) from error
    except ValueError as error:
        reason = str(error)
        if "recursion limit exceeded" in reason:
            reason = f"it is nested too deeply: {reason}."
        raise RequestError(reason, structured.source) from error


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


def _with_ascii_digits(text: str) -> str:
    schema = json.loads(text)
    return json.dumps({} if schema is True else _convert_patterns(schema))


def _convert_patterns(schema: Any) -> Any:
    """Convert the patterns of a schema. Constants, defaults and examples stay unchanged."""
    if isinstance(schema, list):
        return [_convert_patterns(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    out = {}
    for name, value in schema.items():
        if name == "pattern" and isinstance(value, str):
            out[name] = ascii_digits(value)
        else:
            out[name] = value if name in _VALUES else _convert_patterns(value)
    return out


def _lark(grammar: str) -> str:
    """Convert GBNF to Lark's notation. GBNF rules have ::= between name and body."""
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(grammar))
    except RecursionError:
        raise
    except Exception as error:  # the converter raises errors of many types
        raise ValueError(f"the GBNF grammar cannot be read: {error}") from error
