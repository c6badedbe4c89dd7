"""Required tool calls of the default model: grammars hold it to the tools' schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.system.server import Server, serving

pytestmark = pytest.mark.model


class Address(pydantic.BaseModel):
    city: Literal["Paris", "Rome"]
    number: int


class Visit(pydantic.BaseModel):
    address: Address
    days: Literal[1, 2, 3]


class Now(pydantic.BaseModel):
    zone: Literal["UTC", "CET"]


TOOLS = [openai.pydantic_function_tool(Visit), openai.pydantic_function_tool(Now)]
MESSAGES: list[Any] = [{"role": "user", "content": "Plan a visit to Rome."}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--max-num-seqs", "4") as each:
        yield each


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def check(name: str, arguments: str) -> None:
    kinds: dict[str, type[pydantic.BaseModel]] = {"Visit": Visit, "Now": Now}
    kinds[name].model_validate_json(arguments)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "Visit"}}]
)
def test_calls_are_enforced(client: openai.OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(
        model=model(client),
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=120,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    check(call.function.name, call.function.arguments)
    if choice != "required":
        assert call.function.name == "Visit"
    assert answer.choices[0].finish_reason == "tool_calls"


def test_a_streamed_call_is_enforced(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=model(client),
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=120,
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls or []
    check(call.function.name, call.function.arguments)
    assert call.function.parsed_arguments is not None


def token(client: openai.OpenAI, text: str) -> str:
    body = {"prompt": text, "add_special_tokens": False}
    (found,) = client.post("../tokenize", body=body, cast_to=dict[str, Any])["tokens"]
    return str(found)


@pytest.mark.parametrize("first", ["[", "{"])
def test_an_answer_of_a_format_or_calls(client: openai.OpenAI, first: str) -> None:
    """The first token decides: calls are an array, the answer is an object."""
    with client.chat.completions.stream(
        model=model(client),
        messages=MESSAGES,
        tools=TOOLS,
        parallel_tool_calls=False,
        response_format=Address,
        logit_bias={token(client, first): 100},
        temperature=0,
        max_tokens=120,
    ) as stream:
        choice = stream.get_final_completion().choices[0]
    message = choice.message
    if first == "[":
        (call,) = message.tool_calls or []
        check(call.function.name, call.function.arguments)
        assert choice.finish_reason == "tool_calls"
        assert not message.content
    else:
        assert isinstance(message.parsed, Address)
        assert (choice.finish_reason, message.tool_calls) == ("stop", None)


def test_an_automatic_choice_answers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=model(client), messages=MESSAGES, tools=TOOLS, max_tokens=20
    )
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


def test_a_history_with_calls_is_answered(client: openai.OpenAI) -> None:
    arguments = json.dumps({"zone": "UTC"})
    call = {"id": "call_1", "type": "function", "function": {"name": "Now", "arguments": arguments}}
    history: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]
    answer = client.chat.completions.create(
        model=model(client), messages=history, tools=TOOLS, max_tokens=20
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 100
