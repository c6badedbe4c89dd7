"""What an output must look like: JSON, a regular expression, one of some texts, a grammar.

The rules are checked and spelled for the library that knows how to follow them, llguidance, which
is imported where it is needed. Who rules tokens out by them is runner/grammar.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from windlass.errors import RequestError

_WAYS = ("json", "json_object", "regex", "choice", "grammar")
# Between the tokens of JSON. Models that are held to it may write blanks for ever.
_BLANKS = r"[ \t\n\r]{0,20}"
_VALUES = ("const", "default", "enum", "examples")  # in a schema
_MOST = 65_536  # characters: a larger form would hold up others while it is read
_ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """Exactly one of these, under the names that users of other engines know.

    Usage: `SamplingParams(structured_outputs=StructuredOutputs(json={"type": "object", …}))`.
    """

    json: str | dict[str, Any] | bool | None = None  # a schema; kept as text
    json_object: bool = False  # any object
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None  # Lark's notation, or GBNF

    def __post_init__(self) -> None:
        given = [name for name in _WAYS if getattr(self, name) not in (None, False)]
        if not isinstance(self.json_object, bool):
            raise _wrong(f"json_object must be true or false, got {self.json_object!r:.100}.")
        if self.json is False:
            raise _wrong("the JSON schema is false, which nothing satisfies.")
        if len(given) != 1:
            listed = ", ".join(given) or "none"
            raise _wrong(f"give exactly one of {', '.join(_WAYS)}; got {listed}.")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text):
                raise _wrong(f"{name} must be a text that is not empty, got {text!r:.100}.")
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> StructuredOutputs:
        """From names and values that somebody sent."""
        unknown = [name for name in fields if name not in _WAYS]
        if unknown:
            raise _wrong(f"{unknown[0]!r:.100} is no form of an output. Known: {', '.join(_WAYS)}.")
        return cls(**fields)

    def spelled(self) -> str:
        """As llguidance reads it; a rule that cannot be raises RequestError."""
        matcher = _library().LLMatcher
        try:
            if self.json is not None or self.json_object:
                schema = self.json if self.json is not None else _ANY_OBJECT
                return matcher.grammar_from_json_schema(
                    schema, defaults={"whitespace_pattern": _BLANKS}
                )
            if self.regex is not None:
                return matcher.grammar_from_regex(_plain_digits(self.regex))
            if self.choice is not None:
                texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in self.choice)
                return matcher.grammar_from_lark(f"start: {texts}")
            assert self.grammar is not None
            return matcher.grammar_from_lark(_lark(self.grammar))
        except ValueError as error:
            raise _wrong(str(error)) from error

    def check(self) -> None:
        """Refuse what is no schema, expression or grammar, or one that nothing satisfies."""
        spelled = self.spelled()
        if len(spelled) > _MOST:
            raise _wrong(f"it has {len(spelled):,} characters, at most {_MOST:,} are read.")
        problem = _problem_of(spelled)
        if problem:
            raise _wrong(problem)


def _wrong(why: str) -> RequestError:
    return RequestError(why, "structured_outputs")


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise _wrong(
            "the package llguidance is not installed where the engine runs. Install it with "
            "pip install llguidance."
        ) from error
    return llguidance


@lru_cache(maxsize=64)
def _problem_of(spelled: str) -> str:
    """Why a form cannot be followed; many requests have the same."""
    is_wrong, said = _library().LLMatcher.validate_grammar_with_warnings(spelled)
    return said[0].strip() if is_wrong else ""


def _schema_text(schema: object) -> str:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise _wrong(f"the JSON schema is no JSON: {error}.") from error
    if not isinstance(schema, (Mapping, bool)):
        raise _wrong(f"a JSON schema is an object, got {schema!r:.100}.")
    return json.dumps(_with_plain_digits(schema))


def _plain_digits(regex: str) -> str:
    r"""With \d for 0 to 9, as people mean it: the library takes the digits of all scripts."""
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


def _with_plain_digits(schema: Any) -> Any:
    """The same in the patterns of a schema; values that it gives are left alone."""
    if isinstance(schema, list):
        return [_with_plain_digits(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    out = {}
    for name, value in schema.items():
        if name == "pattern" and isinstance(value, str):
            out[name] = _plain_digits(value)
        else:
            out[name] = value if name in _VALUES else _with_plain_digits(value)
    return out


def _choices(choice: object) -> tuple[str, ...]:
    texts = isinstance(choice, Sequence) and not isinstance(choice, str) and tuple(choice)
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise _wrong(f"choice must be a list of texts that are not empty, got {choice!r:.100}.")
    return texts


def _lark(grammar: str) -> str:
    """Rules of GBNF have ::= between name and body."""
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(grammar))
    except Exception as error:  # of any kind, since it is meant for people at a terminal
        raise _wrong(f"the GBNF grammar cannot be read: {error}") from error
