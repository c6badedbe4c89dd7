"""Grammars of tool calls: free text, or an answer of a given format, until a call begins, which then follows its schema.

The accepted texts are read by the parser of the same dialect.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from windlass.core.sampling import SamplingParams
from windlass.core.structured import StructuredOutputs
from windlass.errors import RequestError
from windlass.models.dummy import ByteTokenizer
from windlass.text.chat_output import chat_output
from windlass.text.grammar.schema import unsupported_keywords
from windlass.text.grammar.translate import to_llguidance
from windlass.text.grammar.vocabulary import Vocabulary, make_tokenizer
from windlass.text.parsing.output import ParsedMessage, ToolSet
from windlass.text.parsing.parser import OutputParser, ParsingOptions, parse
from windlass.text.parsing.registry import DIALECTS, OutputFormat
from windlass.text.tool_grammar import optional_calls

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
        self._compiled: dict[str, Any] = {}

    def encode(self, text: str) -> list[int]:
        pieces = re.split(f"({'|'.join(map(re.escape, self.special)) or '$^'})", text)
        ids = [[self.special[p]] if p in self.special else list(p.encode()) for p in pieces]
        return [token for piece in ids for token in piece]

    def matcher(self, grammar: StructuredOutputs) -> Any:
        if grammar.text not in self._compiled:
            compiled = to_llguidance(grammar, special_ids=self.special_texts)
            matcher = llguidance.LLMatcher(self.tokenizer, compiled, log_level=0)
            assert not matcher.is_error(), matcher.get_error()
            self._compiled[grammar.text] = matcher
        return self._compiled[grammar.text].deep_copy()

    def accepts(self, grammar: StructuredOutputs, text: str) -> bool:
        matcher, tokens = self.matcher(grammar), self.encode(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def tool_set(**options: Any) -> ToolSet:
    return ToolSet(TOOLS, strict=frozenset(["get_weather"]), **options)


@pytest.mark.parametrize("name", CASES)
def test_calls_follow_their_schemas(name: str) -> None:
    dialect, write = CASES[name]
    grammar = optional_calls(tool_set(), DIALECTS[dialect])
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
    assert model.accepts(optional_calls(tool_set(), DIALECTS[dialect]), text), text
    one = optional_calls(tool_set(max_calls=1), DIALECTS[dialect])
    assert not model.accepts(one, text)
    assert model.accepts(one, write(("get_weather", GOOD)))


@pytest.mark.parametrize("name", sorted({dialect for dialect, _ in CASES.values()}))
@pytest.mark.parametrize("max_calls", [None, 1])
def test_answers_without_calls(name: str, max_calls: int | None) -> None:
    grammar = optional_calls(tool_set(max_calls=max_calls), DIALECTS[name])
    answer = "\n\nIt is <b>sunny</b>: {1} [2]\n```python\nx = {}\n```"
    if name == "harmony":
        answer = f"<|channel|>final<|message|>{answer}"
    assert Model("<|channel|><|message|>").accepts(grammar, answer)


@pytest.mark.parametrize("case", ["hermes", "qwen", "glm", "mistral", "granite", "deepseek"])
def test_text_before_a_call(case: str) -> None:
    name, write = CASES[case]
    grammar = optional_calls(tool_set(), DIALECTS[name])
    good, bad = (f"Let me see.\n{write(('get_weather', args))}" for args in (GOOD, BAD[0]))
    assert Model(good).accepts(grammar, good)
    assert not Model(bad).accepts(grammar, bad)


def test_marks_may_be_special_tokens_or_text() -> None:
    text = f"Hm. <tool_call>{json_call('get_weather', GOOD)}</tool_call>"
    grammar = optional_calls(tool_set(), DIALECTS["hermes"])
    assert Model("").accepts(grammar, text)
    assert Model("", "<tool_call>", "</tool_call>").accepts(grammar, text)


ANSWER = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["name", "days"],
    "additionalProperties": False,
}
# Formats of an answer: texts that match, and texts that do not.
FORMATS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"json": ANSWER},
        ['{"name": "now", "days": 3}', '{"name": "[{\\"name\\": \\"now\\"", "days": 0}'],
        ['{"name": "now"}', "Rome", ""],
    ),
    ({"json_object": True}, ['{"a": ["<tool_call>"]}', "{}"], ["[]", "{"]),
    ({"json": {"type": "array", "items": {"type": "integer"}}}, ["[1, 2]", "[]"], ["[now]"]),
    ({"regex": r"[a-z]+\d/"}, ["abc7/"], ["abc/"]),
    ({"choice": ("red", "green")}, ["red", "green"], ["blue", "redgreen"]),
    ({"grammar": 'start: a\na: "x" a | "y"'}, ["y", "xxy"], ["x"]),
    ({"grammar": 'root ::= "x" root | "y"'}, ["y", "xxy"], ["x"]),
]
NAMES = sorted({dialect for dialect, _ in CASES.values()})


def or_answer(dialect: str, form: dict[str, Any], **options: Any) -> StructuredOutputs:
    answer = StructuredOutputs(**form, source="response_format")
    return optional_calls(tool_set(**options), DIALECTS[dialect], answer)


def final(dialect: str, answer: str) -> str:
    """An answer as the model writes it."""
    return f"<|channel|>final<|message|>{answer}" if dialect == "harmony" else answer


def beside_answer(dialect: str) -> ParsingOptions:
    return ParsingOptions(dialect=DIALECTS[dialect], tools=tool_set(beside_answer=True))


@pytest.mark.parametrize("name", CASES)
def test_calls_beside_an_answer(name: str) -> None:
    if name == "json, fenced":
        pytest.skip("beside an answer, calls have no fence")
    dialect, write = CASES[name]
    for form in FORMATS:
        grammar = or_answer(dialect, form[0])
        good, bad = (write(("get_weather", each)) for each in (GOOD, BAD[0]))
        model = Model(good)
        assert model.accepts(grammar, good), good
        assert not model.accepts(grammar, bad) or is_json_object(dialect, form[0])
        assert not model.accepts(grammar, f"Let me see. {good}")
        assert not model.accepts(grammar, good + final(dialect, form[1][0]))
        (call,) = parse(good, beside_answer(dialect)).calls
        assert (call.name, call.values) == ("get_weather", GOOD)
    if dialect != "harmony":
        several = write(("get_weather", GOOD), ("now", {}))
        assert model.accepts(grammar, f"\n\n{several}\n")
        assert not model.accepts(or_answer(dialect, form[0], max_calls=1), several)
        message = parse(f"\n\n{several}\n", beside_answer(dialect))
        assert [call.name for call in message.calls] == ["get_weather", "now"]
        assert message.content == ""


def is_json_object(dialect: str, form: dict[str, Any]) -> bool:
    """Any object may be the answer, and a call of this dialect is an object."""
    return dialect == "llama3_json" and "json_object" in form


@pytest.mark.parametrize("name", NAMES)
def test_answers_beside_calls(name: str) -> None:
    model = Model("<|channel|><|message|>")
    for form, good, bad in FORMATS:
        grammar = or_answer(name, form)
        for answer in good:
            text = final(name, answer)
            assert model.accepts(grammar, text), text
            message = parse(text, beside_answer(name))
            assert (message.content, message.calls) == (answer, [])
        for answer in bad:
            assert not model.accepts(grammar, final(name, answer)), answer
    assert not model.accepts(grammar, "")


def test_a_final_message_may_name_its_type() -> None:
    text = '<|channel|>final <|constrain|>json<|message|>{"a": 1}'
    assert Model(text).accepts(or_answer("harmony", {"json_object": True}), text)
    assert parse(text, beside_answer("harmony")).content == '{"a": 1}'


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("harmony")])
def test_calls_inside_an_answer_are_its_text(name: str) -> None:
    dialect, write = CASES[name]
    call = write(("get_weather", GOOD))
    for answer in (json.dumps({"note": call}), json.dumps([call]), f"See {call}"):
        message = parse(answer, beside_answer(dialect))
        assert (message.content, message.calls) == (answer, [])


def test_answers_that_resemble_calls() -> None:
    """Only a known tool's name and then its arguments are a call."""
    for answer in (
        '{"name": "now", "days": 3}',
        '{"name": "now"}',
        '{"name": "unknown", "parameters": {}}',
        '{"parameters": {}, "name": "now"}',
        '[{"name": "now", "parameters": {}}]',
        "[now]",
        "[now, (1)]",
    ):
        for dialect in ("llama3_json", "json", "pythonic"):
            message = parse(answer, beside_answer(dialect))
            assert (message.content, message.calls) == (answer, [])


def written(
    model: Model, grammar: StructuredOutputs, random: Random, first: str
) -> tuple[str, bool]:
    """A random output that begins with `first`, and whether it has an end."""
    matcher, tokens = model.matcher(grammar), model.encode(first)
    assert matcher.consume_tokens(tokens), first
    while not matcher.is_stopped() and len(tokens) < 400:
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(300) if mask[token // 8] >> token % 8 & 1]
        # Texts end soon, and are readable.
        ends = [token for token in allowed if token == 256 or chr(token) in "\"<]})'"]
        plain = [token for token in allowed if token > 256 or chr(token).isalnum()]
        token = random.choice(random.choice([each for each in (ends, plain, allowed) if each]))
        if token == 256:
            break
        assert matcher.consume_token(token)
        tokens.append(token)
    marks = {token: mark.encode() for mark, token in model.special.items()}
    text = b"".join(marks.get(token) or bytes([token]) for token in tokens)
    return text.decode(errors="replace"), matcher.is_accepting()


def in_chunks(text: str, options: ParsingOptions, random: Random) -> ParsedMessage:
    parser, message = OutputParser(options), ParsedMessage()
    while text:
        size = random.randint(1, 9)
        message.add(parser.feed(text[:size]))
        text = text[size:]
    message.add(parser.feed("", last=True))
    return message


@pytest.mark.parametrize("name", [name for name in CASES if name != "json, fenced"])
def test_random_outputs(name: str) -> None:
    """Each is valid calls or a valid answer, the same for any chunks."""
    dialect, write = CASES[name]
    options = beside_answer(dialect)
    grammar = or_answer(dialect, {"json": ANSWER})
    call = write(("get_weather", GOOD))
    model, begun = Model(call), call[: call.index("get_weather") + len("get_weather")]
    for seed in range(12):
        random = Random(seed)
        text, is_complete = written(
            model, grammar, random, begun if seed % 2 else final(dialect, '{"')
        )
        message = parse(text, options)
        assert bool(message.calls) != bool(message.content) or not is_complete, text
        if is_complete and message.content:
            assert json.loads(message.content, strict=False).keys() == {"name", "days"}
        for each in message.calls if is_complete else ():
            assert each.name in TOOLS
            if each.name == "get_weather":
                assert each.values["city"] in ("Rome", "Paris"), text
                assert each.values["days"] in range(1, 10)
        streamed = in_chunks(text, options, random)
        assert (streamed.reasoning, streamed.content) == (message.reasoning, message.content)
        assert [(each.name, each.arguments) for each in streamed.calls] == [
            (each.name, each.arguments) for each in message.calls
        ]


@pytest.mark.parametrize("write", [harmony, harmony_role])
def test_required_calls_behind_reasoning(write: Any) -> None:
    tools = replace(tool_set(), forced=True)
    form = OutputFormat(DIALECTS["harmony"], None)
    given = {"prompt": "<|start|>assistant", "tokenizer": BYTES}
    made = chat_output(form, tools, SamplingParams(), **given)
    assert made.parsing.dialect is form.dialect
    grammar = made.sampling.structured_outputs
    assert grammar is not None
    good, bad = (write(("get_weather", each)) for each in (GOOD, BAD[0]))
    model = Model(good)
    assert model.accepts(grammar, good)
    assert model.accepts(grammar, write(("now", {"a": 1})))
    assert not model.accepts(grammar, bad)
    assert not model.accepts(grammar, "<|channel|>final<|message|>Yes.")
    assert not model.accepts(grammar, "<|channel|>analysis<|message|>Hm.")
    (call,) = parse(good, made.parsing).calls
    assert call.values == GOOD
    # The reasoning of a budget cannot be followed there: a JSON array has none.
    limited = chat_output(form, tools, SamplingParams(thinking_token_budget=3), **given)
    assert limited.parsing.dialect is DIALECTS["json"]


def test_only_listed_tools_may_be_called() -> None:
    made = chat_output(
        OutputFormat(DIALECTS["hermes"], None),
        ToolSet({"now": {}}, only_these=True),
        SamplingParams(),
        prompt="",
        tokenizer=BYTES,
    )
    grammar, model = made.sampling.structured_outputs, Model("")
    assert grammar is not None
    assert model.accepts(grammar, hermes(("now", {"a": 1})))
    assert model.accepts(grammar, "Yes.")
    assert not model.accepts(grammar, hermes(("get_weather", GOOD)))


def test_what_is_not_enforced_is_named() -> None:
    form = {"json": {"type": "array", "uniqueItems": True}}
    assert unsupported_keywords(or_answer("hermes", form)) == ("uniqueItems at #",)


def test_errors_name_what_may_be_wrong() -> None:
    assert or_answer("hermes", {"json": {}}).source == "tools or response_format"
    answer = StructuredOutputs(json={"type": "objekt"}, source="response_format")
    loose = optional_calls(ToolSet(TOOLS), DIALECTS["hermes"], answer)
    assert loose.source == "response_format"


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
    structured = optional_calls(tools, DIALECTS[name])
    unsupported_keywords(structured)
    with suppress(RequestError):
        grammar = to_llguidance(structured)
        llguidance.LLMatcher(Model("").tokenizer, grammar, log_level=0).get_error()
