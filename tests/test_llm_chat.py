"""LLM.chat with tools, variables of the template, and parsed messages, on a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.runner.test_deterministic import CONFIG
from windlass import LLM, SamplingParams
from windlass.build import Built, build_engine, open_model
from windlass.config import EngineConfig
from windlass.core.card import ModelCard
from windlass.errors import RequestError

TEMPLATE = """{%- for tool in tools %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}{{ '<' + message.role + '>' + message.content }}
{%- for call in message.tool_calls %}<tool_call>{{ call.function.arguments | tojson }}</tool_call>{% endfor %}
{%- endfor %}{{ note }}{{ '<think>' if enable_thinking }}"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
HI = [{"role": "user", "content": "Hi"}]
# Random logits prefer no token: short answers need no luck.
PARAMS = SamplingParams(max_tokens=250, seed=1)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelCard, Built]:
    path = tmp_path_factory.mktemp("model")
    sizes = {
        "head_dim": 16,
        "intermediate_size": 224,
        "vocab_size": 300,
        "eos_token_id": 256,
        "max_position_embeddings": 1024,
    }
    (path / "config.json").write_text(json.dumps(CONFIG | sizes))
    config = EngineConfig.of(model=str(path), load_format="dummy", device="cpu", num_blocks=200)
    opened = open_model(config)
    return opened.card, build_engine(config, opened.source)


@pytest.fixture(scope="module")
def llm(built: tuple[ModelCard, Built]) -> LLM:
    card, engine = built
    return LLM.over(replace(card, chat_template=TEMPLATE), engine)


def prompt_of(llm: LLM, messages: list[dict[str, Any]], **options: Any) -> str:
    (result,) = llm.chat(messages, SamplingParams(max_tokens=1), **options)
    return bytes(result.prompt_token_ids).decode()


def test_required_calls_are_parsed(llm: LLM) -> None:
    results = llm.chat([HI, HI], PARAMS, tools=[WEATHER], tool_choice="required")
    for result in results:
        message = result.outputs[0].message
        assert message is not None
        assert message.calls
        for call in message.calls:
            assert call.name == "get_weather"
            assert call.values["city"] in ("Rome", "Paris")


@pytest.mark.parametrize("parallel", [True, False])
def test_a_strict_call_follows_its_schema_once_begun(
    built: tuple[ModelCard, Built], parallel: bool
) -> None:
    """The template has no marks of calls, so a call begins with a bracket."""
    card, engine = built
    llm = LLM.over(replace(card, chat_template="{{ messages[0].content }}"), engine)
    function = {**WEATHER["function"], "strict": True}
    params = SamplingParams(max_tokens=400, seed=1, logit_bias={ord("["): 90.0, ord("]"): 50.0})
    options = {"tools": [{"type": "function", "function": function}], "tool_choice": "auto"}
    for result in llm.chat([HI] * 3, params, parallel_tool_calls=parallel, **options):
        message = result.outputs[0].message
        assert message is not None
        assert [call.name for call in message.calls] == ["get_weather"]
        assert message.calls[0].values["city"] in ("Rome", "Paris")
        assert message.content == ""
    loose = {"tools": [WEATHER], "tool_choice": "auto"}
    (result,) = llm.chat(HI, params, **loose)
    assert result.outputs[0].message is not None
    assert not result.outputs[0].message.calls


ANSWER = {
    "type": "object",
    "properties": {"days": {"enum": [1, 22]}},
    "required": ["days"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("thinks", [True, False])
def test_an_answer_of_a_given_format_or_calls(llm: LLM, strict: bool, thinks: bool) -> None:
    """The first token decides, behind the reasoning."""
    options: dict[str, Any] = {
        "tools": [{"type": "function", "function": {**WEATHER["function"], "strict": strict}}],
        "chat_template_kwargs": {"enable_thinking": thinks},
    }
    budget = {"thinking_token_budget": 0} if thinks else {}
    for first in "<{":
        params = SamplingParams(
            max_tokens=300,
            seed=1,
            structured_outputs={"json": ANSWER},
            logit_bias={ord(first): 20.0, ord("}"): 40.0, ord('"'): 20.0, 256: 60.0},
            **budget,
        )
        for result in llm.chat([HI] * 2, params, **options):
            message = result.outputs[0].message
            assert message is not None
            assert result.outputs[0].finish_reason == "stop"
            assert (bytes(result.outputs[0].token_ids[:8]) == b"</think>") == thinks
            if first == "{":
                assert message.calls == []
                assert json.loads(message.content) in ({"days": 1}, {"days": 22})
                continue
            assert message.content == ""
            assert message.calls
            for call in message.calls:
                assert call.name == "get_weather"
                assert not strict or call.values["city"] in ("Rome", "Paris")


@pytest.mark.parametrize("is_nested", [True, False])
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_called(llm: LLM, mode: str, is_nested: bool) -> None:
    """The prompt has all tools, so that its prefix stays cached."""
    now = {"type": "function", "function": {"name": "now"}}
    allowed: dict[str, Any] = {"mode": mode, "tools": [now]}
    choice = {"type": "allowed_tools", **({"allowed_tools": allowed} if is_nested else allowed)}
    options: dict[str, Any] = {"tools": [WEATHER, now], "tool_choice": choice}
    assert '"name": "get_weather"' in prompt_of(llm, HI, **options)
    bias = {ord("<"): 20.0, ord("}"): 40.0, ord('"'): 20.0, 256: 15.0}
    params = SamplingParams(max_tokens=300, seed=1, logit_bias=bias)
    for result in llm.chat([HI] * 2, params, **options):
        message = result.outputs[0].message
        assert message is not None
        assert {call.name for call in message.calls} <= {"now"}
        assert message.calls or mode == "auto"


def test_reasoning_ends_within_its_budget(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, seed=1, ignore_eos=True, thinking_token_budget=6)
    (result,) = llm.chat(HI, params, chat_template_kwargs={"enable_thinking": True})
    output = result.outputs[0]
    assert bytes(output.token_ids[6:14]) == b"</think>"
    assert output.message is not None
    assert output.text.split("</think>")[0].strip() == output.message.reasoning
    assert "</think>" not in output.message.content
    streamed = "".join(llm.stream_chat(HI, params))
    assert "</think>" not in streamed  # the prompt opens no reasoning


def test_tools_and_variables_reach_the_template(llm: LLM) -> None:
    call = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    history = [
        *HI,
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "1", "content": "Sunny"},
    ]
    text = prompt_of(llm, history, tools=[WEATHER], chat_template_kwargs={"note": "NB"})
    assert '"name": "get_weather"' in text
    assert '<tool_call>{"city": "Rome"}</tool_call><tool>SunnyNB' in text
    assert "get_weather" not in prompt_of(llm, HI, tools=[WEATHER], tool_choice="none")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tools": [{"type": "function"}]}, "tools.function is missing"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [WEATHER], "tool_choice": "later"}, "tool_choice must be"),
    ],
)
def test_bad_tools(llm: LLM, options: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        llm.chat(HI, PARAMS, **options)


def test_bad_calls_in_a_history(llm: LLM) -> None:
    with pytest.raises(RequestError, match="must have a function with a name"):
        llm.chat([*HI, {"role": "assistant", "tool_calls": [{"id": "1"}]}], PARAMS)
