"""The SDKs of OpenAI, Anthropic and Ollama with formats, calls and budgets that the engine enforces."""

from __future__ import annotations

import json
from typing import Any, Literal

import anthropic
import ollama
import pytest
from openai import BadRequestError
from pydantic import BaseModel, Field

from tests.serve.conftest import Server

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
HI: Any = [{"role": "user", "content": "Hi"}]
GREEDY: Any = {"model": "tiny", "temperature": 0.0}


class Visit(BaseModel):
    """A visit to a city."""

    city: Literal["Rome", "Paris"]
    days: int = Field(ge=1, le=9)
    tags: set[Literal["art", "food"]] = Field(max_length=2)


def test_openai_parses_a_class(tiny: Server) -> None:
    answer = tiny.openai.chat.completions.parse(
        messages=HI, response_format=Visit, max_tokens=300, **GREEDY
    )
    assert isinstance(answer.choices[0].message.parsed, Visit)
    response = tiny.openai.responses.parse(
        input="Hi", text_format=Visit, max_output_tokens=300, **GREEDY
    )
    assert isinstance(response.output_parsed, Visit)
    raw = tiny.openai.chat.completions.with_raw_response.parse(
        messages=HI, response_format=Visit, max_tokens=300, **GREEDY
    )
    assert raw.headers["X-Windlass-Schema-Relaxed"] == "uniqueItems at #/properties/tags"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_openai_streams_calls(tiny: Server, choice: Any) -> None:
    with tiny.openai.chat.completions.stream(
        messages=HI,
        tools=[TOOL],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=300,
        **GREEDY,
    ) as stream:
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or ()
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Paris")


def test_openai_responses_call(tiny: Server) -> None:
    tool: Any = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}
    response = tiny.openai.responses.create(
        input="Hi", tools=[tool], tool_choice="required", max_output_tokens=900, **GREEDY
    )
    calls = [item for item in response.output if item.type == "function_call"]
    assert json.loads(calls[0].arguments)["city"] in ("Rome", "Paris")


LETTERS = list(range(ord("a"), ord("z") + 1))  # one byte each: a token has one character
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}


def test_openai_with_a_thinking_budget(tiny: Server) -> None:
    answer = tiny.openai.chat.completions.create(
        messages=HI,
        max_tokens=60,
        extra_body={**THINKING, "thinking_budget": 20, "allowed_token_ids": LETTERS},
        **GREEDY,
    )
    usage = answer.usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 20
    message = answer.choices[0].message
    assert message.model_extra
    assert len(message.model_extra["reasoning_content"]) == 20
    assert len(message.content or "") == 60 - 20 - len("</think>")
    both = tiny.openai.chat.completions.parse(
        messages=HI,
        response_format=Visit,
        max_tokens=400,
        extra_body={**THINKING, "reasoning": {"max_tokens": 20}},
        **GREEDY,
    )
    parsed = both.choices[0].message
    assert isinstance(parsed.parsed, Visit)
    assert parsed.model_extra
    assert parsed.model_extra["reasoning_content"]


def test_anthropic_thinks_and_calls(tiny: Server) -> None:
    client = anthropic.Anthropic(base_url=tiny.url, api_key="none", max_retries=0)
    message = client.messages.create(
        model="tiny",
        extra_body={"temperature": 0.0},
        messages=HI,
        max_tokens=400,
        thinking={"type": "enabled", "budget_tokens": 10},
        tools=[{"name": "get_weather", "input_schema": WEATHER}],
        tool_choice={"type": "tool", "name": "get_weather"},
    )
    assert [block.type for block in message.content] == ["thinking", "tool_use"]
    assert message.content[1].input["city"] in ("Rome", "Paris")
    assert message.stop_reason == "tool_use"


class City(BaseModel):
    """The SDK removes the limits of numbers and lists from schemas."""

    name: Literal["Rome", "Paris"]


def test_anthropic_parses_a_class(tiny: Server) -> None:
    client = anthropic.Anthropic(base_url=tiny.url, api_key="none", max_retries=0)
    options: Any = {"model": "tiny", "messages": HI, "max_tokens": 300}
    message = client.messages.parse(**options, output_format=City, extra_body={"temperature": 0.0})
    assert isinstance(message.parsed_output, City)
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format"):
        client.messages.create(**options, extra_body={"output_config": {"format": {"type": "x"}}})


def test_ollama_follows_a_schema(tiny: Server) -> None:
    client = ollama.Client(host=tiny.url)
    options = {"temperature": 0, "num_predict": 300}
    reply = client.chat("tiny", HI, format=Visit.model_json_schema(), options=options)
    Visit.model_validate_json(reply.message.content or "")


def test_a_refusal_reaches_the_client(tiny: Server) -> None:
    bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}
    with pytest.raises(BadRequestError, match="objekt"):
        tiny.openai.chat.completions.create(messages=HI, response_format=bad, **GREEDY)
