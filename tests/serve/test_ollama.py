"""Ollama's API with Ollama's own client."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ollama
import pytest

from tests.serve.conftest import Server, running
from tests.serve.fakes import CARD
from tests.serve.test_tools import CALL_TEXT, HERMES, WEATHER


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(card=replace(CARD, chat_template=HERMES)) as each:
        yield each


@pytest.fixture(scope="module")
def client(server: Server) -> ollama.Client:
    return ollama.Client(host=server.url)


def say(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"SAY({text})YAS"}]


def test_chat(client: ollama.Client) -> None:
    reply = client.chat(model="counter", messages=say("Yes."), options={"temperature": 0})
    assert reply.message.content == "Yes."
    assert (reply.done, reply.done_reason) == (True, "stop")
    assert reply.eval_count == len("Yes.") + 1
    assert reply.prompt_eval_count
    assert reply.total_duration


def test_a_streamed_chat(client: ollama.Client) -> None:
    text = f"<think>Hm.</think>Let me see. {CALL_TEXT}"
    parts = list(client.chat(model="counter", messages=say(text), tools=[WEATHER], stream=True))
    assert "".join(part.message.content or "" for part in parts) == "Let me see."
    assert "".join(part.message.thinking or "" for part in parts) == "Hm."
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("get_weather", {"city": "Paris"})
    ]
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]


def test_calls_or_an_answer_of_a_format(client: ollama.Client) -> None:
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
    for text, num_calls in ((CALL_TEXT, 1), ('{"text": "<tool_call>"}', 0)):
        reply = client.chat(
            model="counter", messages=say(text), tools=[tool], format="json", stream=False
        )
        assert len(reply.message.tool_calls or ()) == num_calls
        assert reply.message.content == ("" if num_calls else text)


def test_generate(client: ollama.Client) -> None:
    reply = client.generate(model="counter:latest", prompt="SAY(Yes.)YAS", system="Be brief.")
    assert reply.response == "Yes."
    options = {"num_predict": 2}
    cut = client.generate(model="counter", prompt="SAY(Yes.)YAS", options=options)
    assert (cut.response, cut.done_reason) == ("Ye", "length")
    unlimited = client.generate(model="counter", prompt="SAY(Yes.)YAS", options={"num_predict": 0})
    assert unlimited.response == "Yes."
    raw = client.generate(model="counter", prompt="SAY(No.)YAS", raw=True, stream=True)
    assert "".join(part.response or "" for part in raw) == "No."


def test_a_history_with_calls(client: ollama.Client) -> None:
    call = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    history = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Sunny.", "tool_name": "get_weather"},
        *say("Yes."),
    ]
    assert client.chat(model="counter", messages=history).message.content == "Yes."


def test_models(client: ollama.Client) -> None:
    (model,) = client.list().models
    assert model.model == "counter"
    shown = client.show("counter")
    assert shown.template == HERMES
    assert shown.capabilities == ["completion", "tools"]


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"options": {"mirostat": 2}}, 400, "'mirostat', which is not supported"),
        ({"model": "llama3"}, 404, "counter"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, 400, "images"),
    ],
)
def test_bad_requests(
    client: ollama.Client, fields: dict[str, Any], status: int, text: str
) -> None:
    with pytest.raises(ollama.ResponseError, match=text) as caught:
        client.chat(**{"model": "counter", "messages": say("Yes."), **fields})
    assert caught.value.status_code == status
