"""Fields that clients send beside those that the engine needs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.conftest import Server, running
from windlass.errors import RequestError
from windlass.serve.anthropic_api import MessagesRequest
from windlass.serve.protocol import ChatRequest
from windlass.serve.responses_api import ResponsesRequest

ACCEPTED: list[dict[str, Any]] = [
    {"reasoning_effort": "low"},
    {"verbosity": "low"},
    {"store": True},
    {"prediction": {"type": "content", "content": "abc"}},
    {"stream_options": {"include_usage": True}},
    {"service_tier": "auto"},
    {"thinking_budget": 100},
    {"thinking_token_budget": -1},
    {"reasoning": {"effort": "low", "max_tokens": 10, "exclude": True, "enabled": True}},
    {"top_logprobs": 0},
    {"top_logprobs": 0, "logprobs": True},
    {"metadata": {"a": "b"}, "safety_identifier": "x", "prompt_cache_key": "y", "user": "z"},
    {"parallel_tool_calls": True},
    {"messages": [{"role": "user", "content": "Hi", "id": "m1", "name": "Ann"}]},
    {"messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}]},
    {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "function", "name": "f", "content": "1"},
        ]
    },
]


@pytest.mark.parametrize("fields", ACCEPTED)
def test_accepted(server: Server, fields: dict[str, Any]) -> None:
    response = server.chat(max_tokens=2, **fields)
    assert response.status_code == 200, response.text
    assert "X-Windlass-Unknown-Fields" not in response.headers


def test_unknown_fields_are_named(server: Server) -> None:
    for stream in (False, True):
        response = server.chat(max_tokens=2, temprature=1, frobnicate=2, stream=stream)
        assert response.status_code == 200
        assert response.headers["X-Windlass-Unknown-Fields"] == "temprature, frobnicate"


MESSAGES = {"messages": [{"role": "user", "content": "Hi"}]}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/messages": {**MESSAGES, "max_tokens": 2},
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/api/chat": {"model": "counter", **MESSAGES, "stream": False, "options": {"num_predict": 2}},
    "/api/generate": {"model": "counter", "prompt": "Hi", "options": {"num_predict": 2}},
    "/api/show": {"model": "counter"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [72]},
    "/apply-template": MESSAGES,
}


@pytest.mark.parametrize("path", PATHS)
def test_unknown_fields_are_named_on_every_path(server: Server, path: str, caplog) -> None:
    response = server.http.post(path, json={**PATHS[path], "frobnicate": 1})
    assert response.status_code == 200, response.text
    assert response.headers["X-Windlass-Unknown-Fields"] == "frobnicate"
    assert f"{path}: unknown fields: 'frobnicate'" in caplog.text
    assert "X-Windlass-Unknown-Fields" not in server.http.post(path, json=PATHS[path]).headers


def test_many_unknown_fields_are_an_error(server: Server) -> None:
    response = server.chat(**{f"x{i}": 1 for i in range(17)})
    assert response.status_code == 400
    assert "17 fields are unknown" in response.json()["error"]["message"]


def test_unknown_fields_may_be_ignored() -> None:
    with running(unknown_fields="ignore") as server:
        response = server.chat(max_tokens=2, temprature=1)
        assert response.status_code == 200
        assert "X-Windlass-Unknown-Fields" not in response.headers


def test_request_ids_are_echoed(server: Server) -> None:
    body = {"prompt": "Hi", "max_tokens": 2}
    response = server.http.post("/v1/completions", json=body, headers={"X-Request-Id": "abc-1"})
    assert response.headers["X-Request-Id"] == "abc-1"


def test_tokens_as_ids(server: Server) -> None:
    options = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    (choice,) = server.chat(max_tokens=2, **options).json()["choices"]
    entries = choice["logprobs"]["content"]
    assert [e["token"] for e in entries] == [f"token_id:{e['bytes'][0]}" for e in entries]
    options = {"logprobs": 1, "return_tokens_as_token_ids": True}
    (choice,) = server.complete(max_tokens=2, **options).json()["choices"]
    assert all(token.startswith("token_id:") for token in choice["logprobs"]["tokens"])


def test_a_template_of_the_request() -> None:
    with running(trust_request_chat_template=True) as server:
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
        reply = server.http.post("/apply-template", json=body | {"chat_template": template})
        assert reply.json()["prompt"] == "[Hi]"
        broken = server.http.post("/apply-template", json=body | {"chat_template": "{% if"})
        assert broken.status_code == 400
        assert broken.json()["error"]["param"] == "chat_template"
        assert "<user>Hi" in server.http.post("/apply-template", json=body).json()["prompt"]


BUDGETS: list[tuple[dict[str, Any], int | None]] = [
    ({}, None),
    ({"thinking_token_budget": 7}, 7),
    ({"thinking_budget": 0}, 0),
    ({"thinking_budget": -1}, None),
    ({"reasoning": {"max_tokens": 7}}, 7),
    ({"chat_template_kwargs": {"thinking_budget": 7}, "thinking_budget": 7}, 7),
    ({"chat_template_kwargs": {"thinking_budget": "of the template"}}, None),
]


@pytest.mark.parametrize(("fields", "budget"), BUDGETS)
def test_names_of_the_thinking_budget(fields: dict[str, Any], budget: int | None) -> None:
    body = ChatRequest.of({"messages": [], **fields}, 0)
    assert body.max_thinking_tokens == budget


def test_budgets_of_other_apis() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    thinking = {"type": "enabled", "budget_tokens": 7}
    fields = {"max_tokens": 9, "messages": messages, "thinking": thinking}
    assert MessagesRequest.of(fields, 0).chat().max_thinking_tokens == 7
    response = ResponsesRequest.of({"input": "Hi", "reasoning": {"max_tokens": 7}}, 0)
    assert response.chat([]).max_thinking_tokens == 7


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        ("chat/completions", {"thinking_budget": 1, "thinking_token_budget": 2}, "differ"),
        ("chat/completions", {"thinking_budget": -2}, "thinking_budget"),
        ("chat/completions", {"reasoning": {"tokens": 2}}, "Did you mean 'max_tokens'"),
        ("messages", {"thinking": {"budget_tokens": "x"}, "max_tokens": 9}, "whole number"),
        ("completions", {"prompt": "Hi", "thinking_token_budget": 2}, "thinking_token_budget"),
    ],
)
def test_bad_budgets(server: Server, path: str, fields: dict[str, Any], says: str) -> None:
    messages = {"messages": [{"role": "user", "content": "Hi"}]} if "prompt" not in fields else {}
    response = server.http.post(f"/v1/{path}", json={**messages, **fields})
    assert response.status_code == 400, response.text
    assert says in response.text


def test_the_older_form_of_a_call_in_a_history() -> None:
    call = {"name": "now", "arguments": '{"zone": "UTC"}'}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "now", "content": "noon"},
    ]
    body = ChatRequest.of({"messages": messages}, 100)
    rendered = body.messages[1].for_template()
    assert rendered["tool_calls"][0]["function"] == {"name": "now", "arguments": {"zone": "UTC"}}
    assert "function_call" not in rendered
    with pytest.raises(RequestError, match="a function with a name"):
        ChatRequest.of({"messages": [{"role": "assistant", "function_call": {"x": 1}}]}, 100)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"functions": [{"name": "now"}]}, "Use tools."),
        ({"function_call": {"name": "now"}}, "Use tool_choice."),
        ({"max_tokens": -1}, "must be a whole number >= 0, got -1."),
    ],
)
def test_refusals_say_what_to_send_instead(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError) as raised:
        ChatRequest.of({**MESSAGES, **fields}, 100)
    assert text in str(raised.value)
