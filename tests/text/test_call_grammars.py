"""Grammars of strict tool calls: free text until a call begins, which then follows its schema.

The accepted texts are read by the parser of the same dialect.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

import pytest

from windlass.core.structured import StructuredOutputs
from windlass.errors import RequestError
from windlass.models.dummy import ByteTokenizer
from windlass.text.grammar.schema import unsupported_keywords
from windlass.text.grammar.translate import to_llguidance
from windlass.text.grammar.vocabulary import Vocabulary, make_tokenizer
from windlass.text.parsing.output import ToolSet
from windlass.text.parsing.parser import ParsingOptions, parse
from windlass.text.parsing.registry import DIALECTS
from windlass.text.tool_grammar import strict_calls

llguidance = pytest.importorskip("llguidance")

BYTES = ByteTokenizer(300, (256,))
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Paris"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "note": {"type": "string"},
        "at": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "near": {"$ref": "#/$defs/place"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
TOOLS = {"get_weather": WEATHER, "now": {}}
GOOD = {"city": "Rome", "days": 3}
FULL = {**GOOD, "note": "a <b> {c} 'd'", "at": {"x": 1, "near": {"x": 2}}}
BAD = [{"city": "Oslo", "days": 3}, {"city": "Rome", "days": 30}, {"city": "Rome"}]
SPECIAL = re.compile(r"<\|[^|>]+\|>|<｜[^｜]+｜>|\[[A-Z_]+\]")


def json_call(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments})


def hermes(*calls: tuple[str, dict[str, Any]]) -> str:
    return "\n".join(f"<tool_call>\n{json_call(*call)}\n</tool_call>" for call in calls)


def granite(*calls: tuple[str, dict[str, Any]]) -> str:
    return f"<|tool_call|>[{', '.join(json_call(*call) for call in calls)}]"


def mistral(*calls: tuple[str, dict[str, Any]]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(args)}" for name, args in calls)


def llama(*calls: tuple[str, dict[str, Any]]) -> str:
    return "; ".join(json_call(*call, key="parameters") for call in calls)


def json_calls(*calls: tuple[str, dict[str, Any]]) -> str:
    return f"[{', '.join(json_call(*call) for call in calls)}]"


def deepseek(*calls: tuple[str, dict[str, Any]]) -> str:
    each = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(args)}<｜tool▁call▁end｜>"
        for name, args in calls
    ]
    return f"<｜tool▁calls▁begin｜>{''.join(each)}<｜tool▁calls▁end｜>"


def deepseek_r1(*calls: tuple[str, dict[str, Any]]) -> str:
    each = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(args)}\n```<｜tool▁call▁end｜>"
        for name, args in calls
    ]
    return f"<｜tool▁calls▁begin｜>{''.join(each)}<｜tool▁calls▁end｜>"


def harmony(call: tuple[str, dict[str, Any]]) -> str:
    name, args = call
    return (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(args)}"
    )


def harmony_role(call: tuple[str, dict[str, Any]]) -> str:
    name, args = call
    return f" to=functions.{name}<|channel|>commentary json<|message|>{json.dumps(args)}"


def plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def qwen(*calls: tuple[str, dict[str, Any]]) -> str:
    texts = []
    for name, args in calls:
        inner = "".join(f"<parameter={key}>\n{plain(v)}\n</parameter>\n" for key, v in args.items())
        texts.append(f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>")
    return "\n".join(texts)


def glm(*calls: tuple[str, dict[str, Any]]) -> str:
    texts = []
    for name, args in calls:
        pairs = [
            f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n"
            for key, value in args.items()
        ]
        texts.append(f"<tool_call>{name}\n{''.join(pairs)}</tool_call>")
    return "\n".join(texts)


def pythonic(*calls: tuple[str, dict[str, Any]]) -> str:
    each = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})"
        for name, args in calls
    ]
    return f"[{', '.join(each)}]"


# The dialect, how it writes calls, and its marks that are special tokens of the model.
CASES: dict[str, tuple[str, Any]] = {
    "hermes": ("hermes", hermes),
    "granite": ("granite", granite),
    "mistral": ("mistral", mistral),
    "mistral, array": ("mistral", lambda *calls: f"[TOOL_CALLS]{json_calls(*calls)}"),
    "llama": ("llama3_json", llama),
    "json": ("json", json_calls),
    "json, fenced": ("json", lambda *calls: f"```json\n{json_calls(*calls)}\n```"),
    "deepseek": ("deepseek", deepseek),
    "deepseek r1": ("deepseek", deepseek_r1),
    "harmony": ("harmony", harmony),
    "harmony, role": ("harmony", harmony_role),
    "qwen": ("qwen3_coder", qwen),
    "glm": ("glm45", glm),
    "pythonic": ("pythonic", pythonic),
}


class Model:
    """A vocabulary of bytes and of the special tokens of a text."""

    def __init__(self, text: str, *marks: str) -> None:
        self.special = {
            mark: 257 + i for i, mark in enumerate(dict.fromkeys([*SPECIAL.findall(text), *marks]))
        }
        tokens = [BYTES.token_bytes(i) for i in range(300)]
        for mark, token in self.special.items():
            tokens[token] = mark.encode()
        vocabulary = Vocabulary(tokens, [256], list(range(256, 300)))
        self.tokenizer = make_tokenizer(vocabulary, lambda text: BYTES.encode(text, False))
        self.special_texts = vocabulary.special_texts

    def encode(self, text: str) -> list[int]:
        pieces = re.split(f"({'|'.join(map(re.escape, self.special)) or '$^'})", text)
        ids = [[self.special[p]] if p in self.special else list(p.encode()) for p in pieces]
        return [token for piece in ids for token in piece]

    def accepts(self, grammar: StructuredOutputs, text: str) -> bool:
        compiled = to_llguidance(grammar, special_ids=self.special_texts)
        matcher = llguidance.LLMatcher(self.tokenizer, compiled, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens = self.encode(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def tool_set(**options: Any) -> ToolSet:
    return ToolSet(TOOLS, strict=frozenset(["get_weather"]), **options)


@pytest.mark.parametrize("name", CASES)
def test_calls_follow_their_schemas(name: str) -> None:
    dialect, write = CASES[name]
    grammar = strict_calls(tool_set(), DIALECTS[dialect])
    for arguments in (GOOD, FULL):
        text = write(("get_weather", arguments))
        assert Model(text).accepts(grammar, text), text
        options = ParsingOptions(dialect=DIALECTS[dialect], tools=tool_set())
        (call,) = parse(text, options).calls
        assert (call.name, call.values) == ("get_weather", arguments)
    for arguments in BAD:
        text = write(("get_weather", arguments))
        assert not Model(text).accepts(grammar, text), text
    text = write(("now", {"anything": 1}))
    assert Model(text).accepts(grammar, text), text
    text = write(("unknown", {}))
    assert not Model(text).accepts(grammar, text), text


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("harmony")])
def test_several_calls(name: str) -> None:
    dialect, write = CASES[name]
    text = write(("get_weather", GOOD), ("get_weather", GOOD))
    model = Model(text)
    assert model.accepts(strict_calls(tool_set(), DIALECTS[dialect]), text), text
    one = strict_calls(tool_set(max_calls=1), DIALECTS[dialect])
    assert not model.accepts(one, text)
    assert model.accepts(one, write(("get_weather", GOOD)))


@pytest.mark.parametrize("name", sorted({dialect for dialect, _ in CASES.values()}))
@pytest.mark.parametrize("max_calls", [None, 1])
def test_answers_without_calls(name: str, max_calls: int | None) -> None:
    grammar = strict_calls(tool_set(max_calls=max_calls), DIALECTS[name])
    answer = "\n\nIt is <b>sunny</b>: {1} [2]\n```python\nx = {}\n```"
    if name == "harmony":
        answer = f"<|channel|>final<|message|>{answer}"
    assert Model("<|channel|><|message|>").accepts(grammar, answer)


@pytest.mark.parametrize("case", ["hermes", "qwen", "glm", "mistral", "granite", "deepseek"])
def test_text_before_a_call(case: str) -> None:
    name, write = CASES[case]
    grammar = strict_calls(tool_set(), DIALECTS[name])
    good, bad = (f"Let me see.\n{write(('get_weather', args))}" for args in (GOOD, BAD[0]))
    assert Model(good).accepts(grammar, good)
    assert not Model(bad).accepts(grammar, bad)


def test_marks_may_be_special_tokens_or_text() -> None:
    text = f"Hm. <tool_call>{json_call('get_weather', GOOD)}</tool_call>"
    grammar = strict_calls(tool_set(), DIALECTS["hermes"])
    assert Model("").accepts(grammar, text)
    assert Model("", "<tool_call>", "</tool_call>").accepts(grammar, text)


MALFORMED: list[dict[str, Any]] = [
    {"type": "object", "properties": []},
    {"type": "object", "properties": {"a": {"type": 5}}},
    {"type": "object", "properties": {"a": {"type": "array", "minItems": "x"}}},
    {"type": "object", "properties": {"a": {"anyOf": 5}}},
    {"type": "object", "properties": {"a": 5}, "required": 5},
    {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}},
]


@pytest.mark.parametrize("schema", MALFORMED)
@pytest.mark.parametrize("name", DIALECTS)
def test_malformed_schemas_are_refused_or_compile(name: str, schema: dict[str, Any]) -> None:
    """No schema of a client is an internal error."""
    tools = ToolSet({"now": schema}, strict=frozenset(["now"]))
    structured = strict_calls(tools, DIALECTS[name])
    unsupported_keywords(structured)
    with suppress(RequestError):
        grammar = to_llguidance(structured)
        llguidance.LLMatcher(Model("").tokenizer, grammar, log_level=0).get_error()
