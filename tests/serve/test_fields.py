"""Fields that clients send beside those that the engine needs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.conftest import Server, running

ACCEPTED: list[dict[str, Any]] = [
    {"reasoning_effort": "low"},
    {"verbosity": "low"},
    {"store": True},
    {"prediction": {"type": "content", "content": "abc"}},
    {"stream_options": {"include_usage": True}},
    {"service_tier": "auto"},
    {"top_logprobs": 0},
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
