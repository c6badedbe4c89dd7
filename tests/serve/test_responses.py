"""OpenAI's Responses API with the openai client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from tests.serve.conftest import Server, running
from tests.serve.fakes import CARD
from tests.serve.test_tools import CALL_TEXT, HERMES

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(card=replace(CARD, chat_template=HERMES), unknown_fields="error") as each:
        yield each


def create(server: Server, text: str, /, **options: Any) -> Any:
    fields = {"model": "counter", "input": f"SAY({text})YAS", **options}
    return server.openai.responses.create(**fields)


def test_text(server: Server) -> None:
    response = create(server, "Yes.", instructions="Be brief.", metadata={"a": "b"})
    assert (response.object, response.status, response.model) == (
        "response",
        "completed",
        "counter",
    )
    assert response.id.startswith("resp_")
    assert response.output_text == "Yes."
    assert response.instructions == "Be brief."
    assert response.metadata == {"a": "b"}
    assert response.usage.output_tokens == len("Yes.") + 1


def test_reasoning_and_a_call(server: Server) -> None:
    response = create(server, f"<think>Hm.</think>Let me see. {CALL_TEXT}", tools=[WEATHER])
    reasoning, message, call = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content[0].text == "Hm."
    assert message.content[0].text == "Let me see."
    assert (call.type, call.name) == ("function_call", "get_weather")
    assert json.loads(call.arguments) == {"city": "Paris"}
    assert response.usage.output_tokens_details.reasoning_tokens == len("Hm.")


def test_calls_or_an_answer_of_a_format(server: Server) -> None:
    schema = {"type": "object", "properties": {"text": {"type": "string"}}}
    form = {"type": "json_schema", "name": "answer", "schema": schema}
    options: dict[str, Any] = {"tools": [WEATHER], "text": {"format": form}}
    answer = json.dumps({"text": "<tool_call>"})
    for stream in (False, True):
        for text, kind in ((CALL_TEXT, "function_call"), (answer, "message")):
            response = create(server, text, stream=stream, **options)
            if stream:
                response = list(response)[-1].response
            assert [item.type for item in response.output] == [kind]
            assert response.output_text == (answer if kind == "message" else "")


def test_a_cut_response_is_incomplete(server: Server) -> None:
    response = create(server, "a long text", max_output_tokens=4)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"


def test_a_stream(server: Server) -> None:
    text = f"<think>Hm.</think>Let me see. {CALL_TEXT}"
    events = list(create(server, text, tools=[WEATHER], stream=True))
    kinds = [event.type for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == 3
    assert kinds.count("response.output_item.done") == 3
    said = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(said) == "Let me see."
    kind = "response.function_call_arguments.delta"
    arguments = [event.delta for event in events if event.type == kind]
    assert json.loads("".join(arguments)) == {"city": "Paris"}
    final = events[-1].response
    whole = create(server, text, tools=[WEATHER])
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    assert final.output_text == whole.output_text


def test_the_client_reads_a_stream(server: Server) -> None:
    with server.openai.responses.stream(model="counter", input="SAY(Yes.)YAS") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == "Yes."


def test_a_response_continues_another(server: Server) -> None:
    first = create(server, CALL_TEXT, tools=[WEATHER])
    result = {
        "type": "function_call_output",
        "call_id": first.output[0].call_id,
        "output": "Sunny. SAY(It is sunny.)YAS",
    }
    second = server.openai.responses.create(
        model="counter", input=[result], previous_response_id=first.id, tools=[WEATHER]
    )
    assert second.output_text == "It is sunny."
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.previous_response_id == first.id
    third = create(server, "Ok.", previous_response_id=second.id, tools=[WEATHER])
    assert third.usage.input_tokens > second.usage.input_tokens


def test_stored_responses(server: Server) -> None:
    kept, forgotten = create(server, "Yes."), create(server, "No.", store=False)
    assert server.openai.responses.retrieve(kept.id).output_text == "Yes."
    server.openai.responses.delete(kept.id)
    for response in (kept, forgotten):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            server.openai.responses.retrieve(response.id)
        with pytest.raises(openai.NotFoundError):
            create(server, "", previous_response_id=response.id)


def test_keys_do_not_share_responses() -> None:
    with running(api_key=("one", "two")) as server:
        one, two = (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
            for key in ("one", "two")
        )
        response = one.responses.create(model="counter", input="Hi", max_output_tokens=3)
        assert one.responses.retrieve(response.id).id == response.id
        with pytest.raises(openai.NotFoundError):
            two.responses.retrieve(response.id)
        with pytest.raises(openai.NotFoundError):
            two.responses.create(model="counter", input="Hi", previous_response_id=response.id)


def test_input_items(server: Server) -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "Weather?"}],
        },
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "get_weather",
            "arguments": '{"city": "Rome"}',
        },
        {"type": "function_call_output", "call_id": "c1", "output": "Sunny."},
        {"role": "user", "content": "SAY(Yes.)YAS"},
    ]
    assert create(server, "", input=items, tools=[WEATHER]).output_text == "Yes."


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"input": [{"type": "image_generation_call"}]}, "image_generation_call"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ({"tools": [{"type": "web_search"}]}, "run on the server"),
        ({"background": True}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens: .* greater than or equal to 1"),
        ({"extra_body": {"max_tokens": 5}}, "max_output_tokens"),
    ],
)
def test_bad_requests(server: Server, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(openai.BadRequestError, match=text):
        create(server, "Yes.", **fields)
