"""LLM.chat with tools, variables of the template, and parsed messages, on a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.runner.test_deterministic import CONFIG
from windlass import LLM, SamplingParams
from windlass.build import build_engine, open_model
from windlass.config import EngineConfig
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
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = tmp_path_factory.mktemp("model")
    sizes = {"head_dim": 16, "intermediate_size": 224, "vocab_size": 300, "eos_token_id": 256}
    (path / "config.json").write_text(json.dumps(CONFIG | sizes))
    config = EngineConfig.of(model=str(path), load_format="dummy", device="cpu", num_blocks=200)
    opened = open_model(config)
    card = replace(opened.card, chat_template=TEMPLATE)
    return LLM.over(card, build_engine(config, opened.source))


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
