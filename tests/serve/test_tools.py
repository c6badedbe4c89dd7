"""Tool calls and reasoning over HTTP, with the openai client, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.serve.conftest import Server, running
from tests.serve.fakes import CARD, TEMPLATE
from windlass.serve.protocol import TokenizeChatRequest

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
# A template of a model that reasons and calls tools as Hermes does.
HERMES = """{%- for tool in tools %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}{{ '<' + message.role + '>' }}{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}{{ message.content }}
{%- for call in message.tool_calls %}<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>{% endfor %}
{%- endfor %}{% if reasoning_effort %}effort {{ reasoning_effort }}{% endif %}{{ '<think>' if open }}"""
CALL_TEXT = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(card=replace(CARD, chat_template=HERMES)) as each:
        yield each


@pytest.fixture(scope="module")
def plain_server() -> Iterator[Server]:
    """Its template knows no tools."""
    with running(card=replace(CARD, chat_template=TEMPLATE)) as each:
        yield each


def say(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"SAY({text})YAS"}]


def whole(server: Server, text: str, **options: Any) -> Any:
    answer = server.openai.chat.completions.create(
        model="counter", messages=say(text), max_tokens=300, **options
    )
    return answer.choices[0]


def streamed(server: Server, text: str, **options: Any) -> tuple[dict[str, Any], str | None]:
    """The message that a client puts together, and the finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    finish = None
    for chunk in server.openai.chat.completions.create(
        model="counter", messages=say(text), max_tokens=300, stream=True, **options
    ):
        (choice,) = chunk.choices
        message["content"] += choice.delta.content or ""
        message["reasoning_content"] += getattr(choice.delta, "reasoning_content", "") or ""
        for call in choice.delta.tool_calls or []:
            if call.id is not None:
                assert call.index == len(message["calls"])
                message["calls"].append([call.function.name, ""])
            message["calls"][call.index][1] += call.function.arguments
        finish = choice.finish_reason or finish
    return message, finish


def test_a_call(server: Server) -> None:
    choice = whole(server, f"<think>Hm.</think>Let me see.\n{CALL_TEXT}", tools=[WEATHER, NOW])
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.reasoning_content == "Hm."
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_a_streamed_call(server: Server) -> None:
    text = f"<think>Hm.</think>Let me see.\n{CALL_TEXT}\n{CALL_TEXT}"
    message, finish = streamed(server, text, tools=[WEATHER])
    assert finish == "tool_calls"
    assert message["content"] == "Let me see."
    assert message["reasoning_content"] == "Hm."
    assert message["calls"] == 2 * [["get_weather", '{"city": "Paris"}']]


def test_one_call_at_a_time(server: Server) -> None:
    both = f"{CALL_TEXT}\n{CALL_TEXT}"
    choice = whole(server, both, tools=[WEATHER], parallel_tool_calls=False)
    assert len(choice.message.tool_calls) == 1
    message, _ = streamed(server, both, tools=[WEATHER], parallel_tool_calls=False)
    assert len(message["calls"]) == 1


@pytest.mark.parametrize("options", [{}, {"tools": [WEATHER], "tool_choice": "none"}])
def test_without_tools_a_call_is_text(server: Server, options: dict[str, Any]) -> None:
    choice = whole(server, CALL_TEXT, **options)
    assert choice.message.content == CALL_TEXT
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"


def test_several_choices_are_parsed_apart(server: Server) -> None:
    answer = server.openai.chat.completions.create(
        model="counter", messages=say(CALL_TEXT), max_tokens=300, tools=[WEATHER], n=3
    )
    assert [len(choice.message.tool_calls or ()) for choice in answer.choices] == [1, 1, 1]


def test_a_cut_call_has_the_reason_length(server: Server) -> None:
    answer = server.openai.chat.completions.create(
        model="counter", messages=say(CALL_TEXT), max_tokens=60, tools=[WEATHER]
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments.startswith('{"cit')


def test_logprobs_cover_all_tokens(server: Server) -> None:
    tokens = 0
    for chunk in server.openai.chat.completions.create(
        model="counter",
        messages=say(f"Yes. {CALL_TEXT}"),
        max_tokens=300,
        stream=True,
        logprobs=True,
        tools=[WEATHER],
    ):
        if chunk.choices[0].logprobs is not None:
            tokens += len(chunk.choices[0].logprobs.content)
    assert tokens == len(f"Yes. {CALL_TEXT}")


def test_reasoning_may_be_hidden(server: Server) -> None:
    hidden = {"extra_body": {"include_reasoning": False}}
    assert not hasattr(
        whole(server, "<think>Hm.</think>Yes.", **hidden).message, "reasoning_content"
    )
    message, _ = streamed(server, "<think>Hm.</think>Yes.", **hidden)
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "")


def test_the_prompt_may_open_the_reasoning(server: Server) -> None:
    is_open = {"extra_body": {"chat_template_kwargs": {"open": True}}}
    choice = whole(server, "Hm.</think>Yes.", **is_open)
    assert (choice.message.reasoning_content, choice.message.content) == ("Hm.", "Yes.")


def render(server: Server, **body: Any) -> str:
    response = server.http.post("/apply-template", json=body)
    assert response.status_code == 200, response.text
    return response.json()["prompt"]


HISTORY = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
]


def test_the_template_renders_tools_calls_and_results(server: Server) -> None:
    text = render(server, messages=HISTORY, tools=[WEATHER])
    assert json.dumps(WEATHER["function"]["description"]) in text
    assert '<tool_call>get_weather {"city": "Paris"}</tool_call>' in text
    assert "<tool>Sunny." in text


def test_messages_as_clients_send_them_back(server: Server) -> None:
    """Only what a template renders has an effect; reasoning and refusals have other names in some APIs."""
    sent = {
        "annotations": [{"type": "url_citation"}],
        "audio": None,
        "cache_control": {"type": "ephemeral"},
        "id": "msg_1",
        "parsed": {"a": 1},
        "provider_specific_fields": {},
        "reasoning_details": [{"type": "reasoning.text", "text": "Hm."}],
        "refusal": None,
        "thinking_blocks": [],
    }
    user = {"role": "user", "content": "Hi"}
    for fields, other in (
        ({"content": "Yes."}, {}),
        ({"content": "Yes."}, {"refusal": "No."}),
        ({"content": "No."}, {"content": None, "refusal": "No."}),
        ({"content": "Yes.", "reasoning_content": "Hm."}, {"reasoning_content": "Hm."}),
        ({"content": "Yes.", "reasoning_content": "Hm."}, {"reasoning": "Hm."}),
        (
            {"content": "Yes.", "reasoning_content": "A"},
            {"reasoning_content": "A", "reasoning": "B"},
        ),
    ):
        plain = {"role": "assistant", **fields}
        given = {"role": "assistant", "content": "Yes.", **sent, **other}
        expected = render(server, messages=[user, plain, user])
        assert render(server, messages=[user, given, user]) == expected


@pytest.mark.parametrize("arguments", ['{"city": ', "[1]", "Paris", '{"a": 1, "a": 2}'])
def test_arguments_that_are_no_object_are_rendered_as_text(server: Server, arguments: str) -> None:
    """A client sends a wrong call back, with an error as its result, for the model to try again."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    history = [HISTORY[0], {"role": "assistant", "tool_calls": [call]}]
    text = render(server, messages=history, tools=[WEATHER])
    assert json.dumps({"invalid_json": arguments}) in text


def test_the_template_does_not_see_strict(server: Server) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    messages = [{"role": "user", "content": "Hi"}]
    expected = render(server, messages=messages, tools=[WEATHER])
    assert render(server, messages=messages, tools=[strict]) == expected


def test_a_template_without_tools_gets_plain_messages(plain_server: Server) -> None:
    text = render(plain_server, messages=HISTORY, tools=[WEATHER])
    assert text.startswith("<system>You can call tools.")
    assert '"description": "The weather of a city."' in text
    assert '<assistant>[{"name": "get_weather", "arguments": {"city": "Paris"}}]' in text
    assert "<user>The tool returned:\nSunny." in text


def test_a_template_without_tools_uses_json_calls(plain_server: Server) -> None:
    text = '[{"name": "get_weather", "arguments": {"city": "Paris"}}]'
    choice = whole(plain_server, text, tools=[WEATHER])
    assert choice.message.tool_calls[0].function.name == "get_weather"
    assert whole(plain_server, text).message.content == text


def test_reasoning_effort_reaches_the_template(server: Server) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert "effort high" in render(server, messages=messages, reasoning_effort="high")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "/"),
        ({"enable_thinking": False}, "False/False"),
        ({"thinking": {"type": "enabled"}}, "True/True"),
        ({"thinking": {"type": "disabled"}}, "False/False"),
        ({"thinking": {"type": "adaptive"}}, "/"),
        ({"thinking": {"type": "enabled"}, "enable_thinking": False}, "False/False"),
        ({"reasoning_effort": "none"}, "False/False"),
        ({"reasoning": {"enabled": True}, "reasoning_effort": "none"}, "True/True"),
        ({"chat_template_kwargs": {"thinking": 1}, "enable_thinking": False}, "False/1"),
    ],
)
def test_reasoning_is_switched_by_any_field(fields: dict[str, Any], expected: str) -> None:
    body = TokenizeChatRequest.of({"messages": [{"role": "user", "content": "Hi"}], **fields}, 0)
    options = body.template_options or {}
    assert f"{options.get('enable_thinking', '')}/{options.get('thinking', '')}" == expected


def test_a_budget_inside_of_thinking(server: Server) -> None:
    body = {"messages": say("Hm.</think>Yes."), "chat_template_kwargs": {"open": True}}
    thinking = {"type": "enabled", "budget_tokens": 5}
    response = server.http.post("/v1/chat/completions", json={**body, "thinking": thinking})
    assert response.status_code == 200, response.text
    twice = {**body, "thinking": thinking, "thinking_budget": 6}
    assert "are aliases and differ" in server.http.post("/v1/chat/completions", json=twice).text


def test_parsers_can_be_set() -> None:
    card = replace(CARD, chat_template=TEMPLATE)
    with running(card=card, tool_call_parser="pythonic", reasoning_parser="think") as server:
        choice = whole(server, "<think>Hm.</think>[get_weather(city='Paris')]", tools=[WEATHER])
        assert choice.message.reasoning_content == "Hm."
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Paris"}


FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"text": {"type": "string"}},
            "required": ["text"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("form", [FORMAT, {"type": "json_object"}])
def test_calls_or_an_answer_of_a_format(server: Server, form: Any) -> None:
    options: dict[str, Any] = {"tools": [WEATHER], "response_format": form}
    is_open = {**options, "extra_body": {"chat_template_kwargs": {"open": True}}}
    choice = whole(server, f"Hm.</think>\n\n{CALL_TEXT}", **is_open)
    assert choice.message.reasoning_content == "Hm."
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.name == "get_weather"
    assert not choice.message.content
    message, finish = streamed(server, f"Hm.</think>\n{CALL_TEXT}", **is_open)
    assert (finish, message["content"]) == ("tool_calls", "")
    assert message["calls"] == [["get_weather", '{"city": "Paris"}']]
    answer = json.dumps({"text": CALL_TEXT.replace('"', "'")})
    choice = whole(server, answer, **options)
    assert (choice.finish_reason, choice.message.content) == ("stop", answer)
    assert choice.message.tool_calls is None
    message, finish = streamed(server, answer, **options)
    assert (finish, message["content"], message["calls"]) == ("stop", answer, [])


def test_errors_of_a_format_beside_tools(server: Server) -> None:
    body = {"messages": say("Yes."), "tools": [WEATHER], "response_format": FORMAT}
    bad = {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}
    response = server.http.post("/v1/chat/completions", json={**body, "response_format": bad})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "response_format"
    loose = {"schema": {"type": "array", "uniqueItems": True}}
    relaxed = {"type": "json_schema", "json_schema": loose}
    response = server.http.post("/v1/chat/completions", json={**body, "response_format": relaxed})
    assert response.headers["X-Windlass-Schema-Relaxed"] == "uniqueItems at #"


def test_strict_tools_with_auto(server: Server) -> None:
    """The engine compiles their grammar; its model ignores it."""
    function = WEATHER["function"]
    parameters = {"type": "object", "properties": {"city": {"not": {"const": "Oslo"}}}}
    strict = {
        "type": "function",
        "function": {**function, "parameters": parameters, "strict": True},
    }
    for stream in (False, True):
        body = {"messages": say(CALL_TEXT), "tools": [strict, NOW], "max_tokens": 300}
        response = server.http.post("/v1/chat/completions", json={**body, "stream": stream})
        assert response.status_code == 200
        relaxed = response.headers["X-Windlass-Schema-Relaxed"]
        assert relaxed == "not at #/properties/city of get_weather"
        assert "get_weather" in response.text
    bad = {**strict, "function": {**strict["function"], "parameters": {"type": "objekt"}}}
    response = server.http.post("/v1/chat/completions", json={**body, "tools": [bad]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
    assert "objekt" in response.json()["error"]["message"]
