"""From a form of output to the text of a grammar for llguidance.

Runs in the sandbox: texts of clients may make the translation itself slow, or its recursion deep.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from windlass.core.structured import StructuredOutputs
from windlass.errors import RequestError

# Between the tokens of JSON. Small models may write blanks for ever.
_WHITESPACE = r"[ \t\n\r]{0,20}"
_VALUES = ("const", "default", "enum", "examples")  # keywords whose content is no schema
_ANY_OBJECT = '{"type": "object"}'


def to_llguidance(form: StructuredOutputs) -> str:
    """The grammar's text; a form that cannot be translated raises RequestError."""
    from llguidance import LLMatcher

    try:
        if form.json is not None or form.json_object:
            schema = _ANY_OBJECT if form.json_object else _with_ascii_digits(form.text)
            return LLMatcher.grammar_from_json_schema(
                schema, defaults={"whitespace_pattern": _WHITESPACE}
            )
        if form.regex is not None:
            return LLMatcher.grammar_from_regex(ascii_digits(form.regex))
        if form.choice is not None:
            # One terminal: as alternatives of a rule, 2,000 choices would exceed the parser's limit.
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in form.choice)
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
        assert form.grammar is not None
        return LLMatcher.grammar_from_lark(_lark(form.grammar))
    except RecursionError as error:
        raise RequestError("it is nested too deeply.", form.source) from error
    except ValueError as error:
        reason = str(error)
        if "recursion limit exceeded" in reason:
            reason = f"it is nested too deeply: {reason}."
        raise RequestError(reason, form.source) from error


def ascii_digits(regex: str) -> str:
    r"""Replace \d by 0 to 9, as people mean it; llguidance takes the digits of all scripts."""
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
    """Convert the patterns of a schema; the values that it gives stay as they are."""
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
    """Lark's notation; rules of GBNF have ::= between name and body."""
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(grammar))
    except RecursionError:
        raise
    except Exception as error:  # the converter raises all kinds
        raise ValueError(f"the GBNF grammar cannot be read: {error}") from error
