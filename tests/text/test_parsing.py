"""Parsers of tool calls and reasoning: what they find, and that it does not depend on chunks."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.errors import ConfigError
from windlass.text.parsing.output import ParsedMessage, ToolSet
from windlass.text.parsing.parser import OutputParser, ParsingOptions, parse
from windlass.text.parsing.reasoning import TAGS, THINK
from windlass.text.parsing.registry import DIALECTS, choose_format

TOOLS = ToolSet(
    {
        "get_weather": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "tags": {"type": "array"},
            },
        },
        "now": {"type": "object", "properties": {}},
    }
)
WEATHER = {"city": 'Paris, "là"', "days": 3, "tags": ["a}", "]b"]}
JSON = json.dumps(WEATHER, ensure_ascii=False)
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE, ONE_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"

# Outputs with a call of get_weather and one of now, with the content before them.
CALLS: dict[str, list[tuple[str, str]]] = {
    "hermes": [
        (
            f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>\n'
            '<tool_call>\n{"name": "now"}\n</tool_call>',
            "Let me see.",
        ),
        (
            f'<tool_call>{{"arguments": {JSON}, "name": "get_weather"}}</tool_call>'
            '<tool_call>{"name": "now", "arguments": {}}',
            "",
        ),
        (
            f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(JSON)}}}</tool_call>'
            '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
            "",
        ),
    ],
    "granite": [
        (
            f'<|tool_call|>[{{"name": "get_weather", "arguments": {JSON}}}, {{"name": "now"}}]',
            "",
        )
    ],
    "llama3_json": [
        (
            f'{{"name": "get_weather", "parameters": {JSON}}}; {{"name": "now", "parameters": {{}}}}',
            "",
        ),
        (
            f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {JSON}}};'
            '{"name": "now"}',
            "",
        ),
    ],
    "pythonic": [
        (
            """[get_weather(city='Paris, "là"', days=3, tags=['a}', ']b']), now()]""",
            "",
        ),
        (
            """<|python_start|>[get_weather(city="Paris, \\"là\\"", days=3, tags=["a}", "]b"]), now( )]<|python_end|>""",
            "",
        ),
    ],
    "mistral": [
        (
            f'Hm.[TOOL_CALLS] [{{"name": "get_weather", "arguments": {JSON}}}, {{"name": "now", "arguments": {{}}}}]',
            "Hm.",
        ),
        (f"Hm. [TOOL_CALLS]get_weather[ARGS]{JSON}[TOOL_CALLS]now[ARGS]{{}}", "Hm."),
        (f"[TOOL_CALLS]get_weather[CALL_ID]abc123DEF[ARGS]{JSON}[TOOL_CALLS]now{{}}", ""),
    ],
    "qwen3_coder": [
        (
            'Ok.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis, "là"\n</parameter>\n'
            '<parameter=days>\n3\n</parameter>\n<parameter=tags>\n["a}", "]b"]\n</parameter>\n'
            "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
            "Ok.",
        )
    ],
    "glm45": [
        (
            '\nOk.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris, "là"</arg_value>\n'
            "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>tags</arg_key>\n"
            '<arg_value>["a}", "]b"]</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>',
            "\nOk.",
        )
    ],
    "deepseek": [
        (
            f"Ok.{BEGIN}{ONE}function{SEP}get_weather\n```json\n{JSON}\n```{ONE_END}\n"
            f"{ONE}function{SEP}now\n```json\n{{}}\n```{ONE_END}{END}",
            "Ok.",
        ),
        (f"{BEGIN}{ONE}get_weather{SEP}{JSON}{ONE_END}{ONE}now{SEP}{{}}{ONE_END}{END}", ""),
    ],
    "harmony": [
        (
            "<|channel|>commentary<|message|>Ok.<|end|><|start|>assistant<|channel|>commentary "
            f"to=functions.get_weather <|constrain|>json<|message|>{JSON}<|call|>"
            "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}",
            "Ok.",
        )
    ],
    "json": [
        (
            f'[{{"name": "get_weather", "arguments": {JSON}}}, {{"name": "now", "arguments": {{}}}}]',
            "",
        ),
        (
            f'```json\n[{{"name": "get_weather", "parameters": {JSON}}}, {{"name": "now"}}]\n```',
            "",
        ),
    ],
}
EXAMPLES = [(name, text, content) for name, cases in CALLS.items() for text, content in cases]
PLAIN = [
    "Hello, world.\n",
    '{"answer": 42}',
    '{"name": "unknown_tool", "arguments": {}}',
    "[1, 2, 3]",
    "[foo(1)]",
    "<tool_cal",
    "",
    "  {",
    "a < b <tool> c",
    "[get_weather",
]
BROKEN = [
    "<tool_call>no JSON</tool_call>",
    '<tool_call>{"name": 3}</tool_call>',
    '<tool_call>{"name": "now", "arguments": {"a": ',
    "<tool_call><function=now><parameter=a>3",
    "<tool_call>",
    f"{BEGIN}{ONE}x",
    "[TOOL_CALLS]",
    "[TOOL_CALLS]now",
    "[TOOL_CALLS][{]",
    "[now(**a)]",
    "[now(__import__('os'))]",
    "<|channel|>final",
    "<|tool_call|>[",
    '{"name": "now", "parameters": {"a": "\\',
    '{"name": "now" "parameters": {}}',
]


DEEP = "[" * 3000 + "]" * 3000
# Values that json.loads refuses with a RecursionError, or accepts although no response can contain them.
HOSTILE = [DEEP, "NaN", "-Infinity", "1e999", r'"\ud800"', "9" * 6000, "'\\ud800'"]


def options_of(name: str, **fields: Any) -> ParsingOptions:
    return ParsingOptions(dialect=DIALECTS[name], tools=TOOLS, **fields)


def in_chunks(text: str, cuts: list[int], options: ParsingOptions) -> ParsedMessage:
    parser, message = OutputParser(options), ParsedMessage()
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, stop in pairwise(borders):
        message.add(parser.feed(text[start:stop]))
    message.add(parser.feed("", last=True))
    return message


def without_ids(message: ParsedMessage) -> tuple[Any, ...]:
    calls = [(call.name, call.arguments) for call in message.calls]
    return message.reasoning, message.content, calls


@pytest.mark.parametrize(("name", "text", "content"), EXAMPLES)
def test_calls_are_found(name: str, text: str, content: str) -> None:
    message = parse(text, options_of(name))
    assert [call.name for call in message.calls] == ["get_weather", "now"]
    assert [json.loads(call.arguments) for call in message.calls] == [WEATHER, {}]
    assert message.content == content
    assert len({call.id for call in message.calls}) == 2


def test_every_dialect_has_an_example() -> None:
    assert set(CALLS) == set(DIALECTS)


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("text", PLAIN)
def test_text_without_calls_is_content(name: str, text: str) -> None:
    message = parse(text, options_of(name))
    assert message.content == text
    assert not message.calls


@pytest.mark.parametrize("text", BROKEN)
@pytest.mark.parametrize("name", DIALECTS)
def test_broken_calls_end(name: str, text: str) -> None:
    """They are content or a call without its end, and the same for any chunking."""
    whole = without_ids(parse(text, options_of(name)))
    assert without_ids(in_chunks(text, list(range(len(text))), options_of(name))) == whole


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: value[:8])
@pytest.mark.parametrize("name", DIALECTS)
def test_values_that_no_response_can_contain(name: str, value: str) -> None:
    """They are text, or arguments as the model wrote them."""
    for text, _ in CALLS[name]:
        for hostile in (
            text.replace(JSON, value),
            text.replace("3", value).replace('"now"', value),
        ):
            message = parse(hostile, options_of(name))
            names = [call.name for call in message.calls]
            json.dumps([message.content, names], ensure_ascii=False).encode()
            for call in message.calls:
                call.arguments.encode()
                json.dumps(call.values, allow_nan=False, ensure_ascii=False).encode()


@pytest.mark.parametrize("value", HOSTILE[:5], ids=lambda value: value[:8])
def test_a_parameter_that_is_no_json_is_text(value: str) -> None:
    text = f"<tool_call><function=now><parameter=a>{value}</parameter></function></tool_call>"
    (call,) = parse(text, options_of("qwen3_coder")).calls
    assert json.loads(call.arguments) == {"a": value}


@pytest.mark.parametrize(("name", "text", "_content"), EXAMPLES)
def test_characters_one_by_one(name: str, text: str, _content: str) -> None:
    whole = parse(text, options_of(name))
    single = in_chunks(text, list(range(len(text))), options_of(name))
    assert without_ids(single) == without_ids(whole)


PIECES = [
    *{text for _, text, _ in EXAMPLES},
    *PLAIN,
    *BROKEN,
    "<think>",
    "</think>",
    "\n",
    "Yes, ",
    *(
        "{",
        "}",
        '"',
        "[",
        "]",
        "\\",
        "<|start|>assistant",
        "<|message|>",
        "<|end|>",
        "</tool_call>",
    ),
]


@given(
    name=st.sampled_from(sorted(DIALECTS)),
    pieces=st.lists(st.sampled_from(PIECES), max_size=5),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    think=st.booleans(),
    is_open=st.booleans(),
)
def test_chunks_do_not_matter(
    name: str, pieces: list[str], cuts: list[int], think: bool, is_open: bool
) -> None:
    options = options_of(name, reasoning=THINK if think else None, in_reasoning=is_open)
    text = "".join(pieces)
    assert without_ids(in_chunks(text, cuts, options)) == without_ids(parse(text, options))


def test_arguments_are_streamed() -> None:
    parser = OutputParser(options_of("hermes"))
    parser.feed('<tool_call>{"name": "now", "arguments": ')
    events = parser.feed('{"a": "long te')
    assert [event.text for event in events] == ['{"a": "long te']  # type: ignore[union-attr]


def test_max_calls_drops_later_calls() -> None:
    one = ToolSet(TOOLS.schemas, max_calls=1)
    text = CALLS["hermes"][0][0]
    message = parse(text, ParsingOptions(dialect=DIALECTS["hermes"], tools=one))
    assert [call.name for call in message.calls] == ["get_weather"]


def test_strings_stay_strings() -> None:
    text = "<tool_call>\n<function=get_weather>\n<parameter=city>\n75001\n</parameter>\n</function>\n</tool_call>"
    (call,) = parse(text, options_of("qwen3_coder")).calls
    assert json.loads(call.arguments) == {"city": "75001"}


@pytest.mark.parametrize(
    "schema", [{"$ref": "#/$defs/a"}, {"enum": ["75001", "75002"]}, {"type": "string"}]
)
def test_strings_stay_strings_by_any_schema(schema: dict[str, Any]) -> None:
    parameters = {"properties": {"city": schema}, "$defs": {"a": {"type": "string"}}}
    tools = ToolSet({"get_weather": parameters})
    text = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>75001</arg_value></tool_call>"
    (call,) = parse(text, ParsingOptions(dialect=DIALECTS["glm45"], tools=tools)).calls
    assert call.values == {"city": "75001"}


@pytest.mark.parametrize("tags", TAGS.values(), ids=list(TAGS))
def test_reasoning(tags: Any) -> None:
    options = ParsingOptions(reasoning=tags)
    message = parse(f"{tags.start}\nI think.\n{tags.end}\n\nYes.", options)
    assert (message.reasoning, message.content) == ("I think.", "Yes.")
    assert parse("Yes.", options).content == "Yes."
    is_open = ParsingOptions(reasoning=tags, in_reasoning=True)
    message = parse(f"I think.{tags.end}Yes.", is_open)
    assert (message.reasoning, message.content) == ("I think.", "Yes.")
    assert parse("I thi", is_open).reasoning == "I thi"


def test_reasoning_before_calls() -> None:
    text = f"<think>Weather?</think>\n\n{CALLS['hermes'][0][0]}"
    message = parse(text, options_of("hermes", reasoning=THINK))
    assert message.reasoning == "Weather?"
    assert [call.name for call in message.calls] == ["get_weather", "now"]


def test_harmony_reasoning() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    )
    message = parse(text, options_of("harmony"))
    assert (message.reasoning, message.content) == ("Hm.", "Yes.")


@pytest.mark.parametrize(
    ("template", "dialect", "reasoning"),
    [
        ("<tool_call> <think>", "hermes", "think"),
        ("<tool_call> <function=", "qwen3_coder", None),
        ("<tool_call> <arg_key> </think>", "glm45", "think"),
        ("[TOOL_CALLS]", "mistral", None),
        ("<|python_tag|>", "llama3_json", None),
        ("<|channel|><|message|>", "harmony", None),
        (BEGIN, "deepseek", None),
        ("<|tool_call|>", "granite", None),
        ("{{ messages }}", "json", None),
    ],
)
def test_parsers_are_chosen_from_the_template(
    template: str, dialect: str, reasoning: str | None
) -> None:
    chosen = choose_format(template, "auto", "auto")
    assert chosen.dialect.name == dialect
    assert (chosen.reasoning.name if chosen.reasoning else None) == reasoning


def test_unknown_parsers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'herms' is unknown. Known: auto, .*hermes"):
        choose_format("", "herms", "auto")
    with pytest.raises(ConfigError, match="Known: auto, none, think"):
        choose_format("", "auto", "thin")
    assert choose_format("<think>", "auto", "none").reasoning is None
