"""Anthropic's Messages API with Anthropic's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anthropic
import pytest

from tests.serve.conftest import Server, running
from tests.serve.fakes import CARD
from tests.serve.test_tools import CALL_TEXT, HERMES

WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(card=replace(CARD, chat_template=HERMES), unknown_fields="error") as each:
        yield each


@pytest.fixture(scope="module")
def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def say(text: str) -> Any:
    return [{"role": "user", "content": [{"type": "text", "text": f"SAY({text})YAS"}]}]


def create(client: anthropic.Anthropic, text: str, **options: Any) -> Any:
    fields = {"model": "counter", "max_tokens": 300, "messages": say(text), **options}
    return client.messages.create(**fields)


def test_text(client: anthropic.Anthropic) -> None:
    message = create(client, "Yes.", system="Be brief.")
    assert (message.type, message.role, message.model) == ("message", "assistant", "counter")
    assert message.id.startswith("msg_")
    assert [(block.type, block.text) for block in message.content] == [("text", "Yes.")]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens == len("Yes.") + 1
    assert message.usage.input_tokens > 0


def test_the_reasons_of_an_end(client: anthropic.Anthropic) -> None:
    assert create(client, "a long text", max_tokens=4).stop_reason == "max_tokens"
    message = create(client, "one END two", stop_sequences=["END"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    assert message.content[0].text == "one "


def test_thinking_and_a_call(client: anthropic.Anthropic) -> None:
    message = create(client, f"<think>Hm.</think>Let me see. {CALL_TEXT}", tools=[WEATHER])
    thinking, text, call = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Hm.")
    assert text.text == "Let me see."
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Paris"})
    assert message.stop_reason == "tool_use"


def test_calls_or_an_answer_of_a_format(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"text": {"type": "string"}}}
    form = {"format": {"type": "json_schema", "schema": schema}}
    answer = json.dumps({"text": "<tool_call>"})
    for text, kind in ((CALL_TEXT, "tool_use"), (answer, "text")):
        message = create(client, text, tools=[WEATHER], extra_body={"output_config": form})
        assert [block.type for block in message.content] == [kind]


def test_a_stream(client: anthropic.Anthropic) -> None:
    text = f"<think>Hm.</think>Let me see. {CALL_TEXT}{CALL_TEXT}"
    with client.messages.stream(
        model="counter", max_tokens=300, messages=say(text), tools=[WEATHER]
    ) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    thinking, said, *calls = message.content
    assert thinking.type == "thinking"
    assert thinking.thinking == "Hm."
    assert said.type == "text"
    assert said.text == "Let me see."
    assert [call.input for call in calls if call.type == "tool_use"] == 2 * [{"city": "Paris"}]
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens == len(text) + 1


def test_a_stream_without_text(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="counter", max_tokens=9, messages=say("")) as stream:
        assert stream.get_final_text() == ""


def test_a_history_with_calls(client: anthropic.Anthropic) -> None:
    call = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Paris"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "text", "text": "Sun"}],
    }
    history = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, call]},
        {"role": "user", "content": [result, *say("Yes.")[0]["content"]]},
    ]
    message = create(client, "", messages=history, tools=[WEATHER])
    assert message.content[0].text == "Yes."
    counted = client.messages.count_tokens(model="counter", messages=history, tools=[WEATHER])
    # Without BOS: the template writes none.
    assert counted.input_tokens == message.usage.input_tokens + (
        message.usage.cache_read_input_tokens or 0
    )


def test_documents_and_redacted_thinking(client: anthropic.Anthropic) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "SAY(Yes.)YAS"}
    redacted = {"type": "redacted_thinking", "data": "x"}
    plain = {"type": "text", "text": "Hm."}

    def history(document: dict[str, Any], *blocks: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [*blocks, plain]},
            {"role": "user", "content": [document]},
        ]

    def count(messages: list[dict[str, Any]]) -> int:
        return client.messages.count_tokens(model="counter", messages=messages).input_tokens  # type: ignore[arg-type]

    document = {"type": "document", "source": source}
    messages = history(document, redacted)
    assert create(client, "", messages=messages).content[0].text == "Yes."
    assert count(messages) == count(history(document))
    assert count(history({**document, "title": "Note"})) == count(messages) + len("Note\n")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image' is not supported"),
    (
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
        "'document' is not supported",
    ),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "run on the server"),
    ({"tool_choice": {"type": "perhaps"}}, "auto, any, tool or none"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "not in tools"),
    ({"max_tokens": 0}, "max_tokens: .* greater than or equal to 1"),
    ({"max_tokns": 3}, "max_tokens"),
]


@pytest.mark.parametrize(("fields", "text"), BAD)
def test_bad_requests(client: anthropic.Anthropic, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=text) as caught:
        create(client, "Yes.", **({"extra_body": fields} if "max_tokns" in fields else fields))
    assert caught.value.body == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": caught.value.body["error"]["message"],
        },  # type: ignore[index]
    }


def test_an_unknown_model(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="counter"):
        create(client, "Yes.", model="claude")


def test_keys() -> None:
    with running(api_key=("secret",)) as server:
        good = anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0)
        assert create(good, "", max_tokens=3).content
        bad = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError):
            create(bad, "")
        azure = {"api-key": "secret"}
        assert server.http.get("/v1/models", headers=azure).status_code == 200
        assert server.http.get("/v1/models").status_code == 401
