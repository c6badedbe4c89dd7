"""Translates structured outputs into the text of an llguidance grammar.

Runs in the sandbox, because a client's input can make the translation slow or its recursion deep.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from windlass.config import SchemaStrictness
from windlass.core.structured import StructuredOutputs
from windlass.errors import RequestError
from windlass.text.grammar.schema import adapt, ascii_digits
from windlass.text.parsing.call_grammar import ANSWER, CallGrammar
from windlass.text.parsing.registry import DIALECTS

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Between JSON tokens. Without a bound, small models may write whitespace for ever.
_WHITESPACE = r"[ \t\n\r]{0,20}"
_ANY_OBJECT = '{"type": "object"}'


def to_llguidance(
    structured: StructuredOutputs,
    strictness: SchemaStrictness = "relaxed",
    special_ids: Mapping[str, int] | None = None,
) -> str:
    """Return the grammar's text. Raises RequestError when there is no translation.

    `special_ids`: ids of the special tokens by their text.
    """
    from llguidance import LLMatcher

    try:
        if structured.json is not None or structured.json_object:
            schema = _ANY_OBJECT
            if structured.json is not None:
                parsed = json.loads(structured.text)
                schema = json.dumps(_enforceable({} if parsed is True else parsed, strictness))
            return LLMatcher.grammar_from_json_schema(schema, defaults=_json_options(strictness))
        if structured.regex is not None:
            return LLMatcher.grammar_from_regex(ascii_digits(structured.regex))
        if structured.choice is not None:
            # One terminal: as alternatives of a rule, 2,000 choices would exceed the parser's limit.
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in structured.choice)
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
        if structured.calls is not None:
            calls = json.loads(structured.calls)
            lark = LLMatcher.grammar_from_lark(_calls(calls, strictness, special_ids))
            if "answer" not in calls:
                return lark
            answer = StructuredOutputs(**calls["answer"], source=structured.source)
            return _with_answer(lark, to_llguidance(answer, strictness, special_ids))
        assert structured.grammar is not None
        return LLMatcher.grammar_from_lark(_lark(structured.grammar))
    except RecursionError as error:
        raise RequestError("it is nested too deeply.", structured.source) from error
    except ValueError as error:
        reason = str(error)
        if "recursion limit exceeded" in reason:
            reason = f"it is nested too deeply: {reason}."
        raise RequestError(reason, structured.source) from error


def _json_options(strictness: SchemaStrictness) -> JsonCompileOptions:
    return {"whitespace_pattern": _WHITESPACE, "coerce_one_of": strictness == "relaxed"}


def _calls(
    calls: dict[str, Any], strictness: SchemaStrictness, special_ids: Mapping[str, int] | None
) -> str:
    """The grammar of a dialect's calls."""
    grammar = CallGrammar(
        calls["tools"],
        max_calls=calls["max_calls"],
        special_ids=special_ids or {},
        adapt=lambda schema: _enforceable(schema, strictness),
        json_options=_json_options(strictness),
        has_answer="answer" in calls,
        must_call=calls.get("must_call", False),
    )
    try:
        return DIALECTS[calls["dialect"]].grammar(grammar)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"the parameters of a tool are no JSON schema: {type(error).__name__}: {error}."
        ) from error


def _with_answer(calls: str, answer: str) -> str:
    """A grammar of calls in which the rule of the answer names the second grammar."""
    first, second = (
        json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
        for text in (calls, answer)
    )
    return json.dumps({"grammars": [first, {**second, "name": ANSWER}]})


def _enforceable(schema: Mapping[str, Any], strictness: SchemaStrictness) -> dict[str, Any]:
    """A schema as llguidance compiles it. Raises when `strictness` does not let keywords be dropped."""
    adapted = adapt(schema)
    if adapted.unsupported and strictness == "strict":
        raise ValueError(
            f"the JSON schema has {', '.join(adapted.unsupported)}, which no grammar enforces. Leave "
            "it out, or start with --schema-strictness relaxed, which ignores it."
        )
    return adapted.schema


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
