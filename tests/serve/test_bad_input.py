"""Every bad request gets an error in one format, which names the field and the fix."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.conftest import Server, running
from tests.serve.fakes import CARD

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    error = response.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    return error


def user(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(unknown_fields="error") as each:
        yield each


USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "now"}}
CALL = {"id": "x", "type": "function", "function": {"name": "now", "arguments": "{}"}}

BAD_CHATS = [
    ({"messages": []}, "messages", "empty"),
    ({"messages": "hi"}, "messages", "array"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role", "'user'"),
    ({"messages": [{"role": "user"}]}, "messages", "no content"),
    ({"messages": [{"role": "user", "content": "x", "nmae": "y"}]}, "messages", "'name'"),
    ({"messages": [{"role": "user", "content": "x", "reasoning": [1]}]}, "messages", "a string"),
    ({"messages": [{"role": "user", "content": "x", "audio": {}}]}, "messages", "'audio'"),
    ({"messages": user(5)}, "messages.0.content", "string"),
    ({"messages": user([{"type": "image_url"}])}, "messages.0.content", "image_url"),
    ({"temprature": 1}, "temprature", "'temperature'"),
    ({"temperature": -1}, "temperature", "-1"),
    ({"temperature": "hot"}, "temperature", "hot"),
    ({"top_p": 0}, "top_p", "(0, 1]"),
    ({"n": 0}, "n", "0"),
    ({"n": 1000}, "n", "128"),
    ({"max_tokens": 1.5}, "max_tokens", "1.5"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "differ"),
    ({"seed": 2**70}, "seed", "less than"),
    ({"stop": [1]}, "stop.0", "string"),
    ({"stop": ""}, "stop", "empty"),
    ({"tools": [{"type": "function"}]}, "tools.0.function", "is missing"),
    ({"tools": [{"type": "retrieval"}]}, "tools.0.type", "function"),
    ({"tools": [TOOL, TOOL]}, "tools", "two tools have the name 'now'"),
    (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools.0.function.name",
        "a b",
    ),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tools": [TOOL], "tool_choice": "perhaps"}, "tool_choice", "'perhaps'"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", "must be"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "then"}}},
        "tool_choice",
        "not in tools (now)",
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}},
        "tool_choice",
        "must have a mode",
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        "tool_choice",
        "must have a mode",
    ),
    (
        {
            "tools": [TOOL],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "then"}],
            },
        },
        "tool_choice",
        "not in tools (now)",
    ),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "huge"),
    (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "x"}]}]},
        "messages",
        "function",
    ),
    ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages", "has tool_calls"),
    (
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": 5}}],
                },
            ]
        },
        "messages",
        "arguments of a tool call",
    ),
    ({"response_format": {"type": "xml"}}, "response_format", "must be 'text', 'json_object'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema must be an"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
        "response_format",
        "a JSON schema is an object",
    ),
    ({"guided_json": {"type": "objekt"}}, "guided_json", "Invalid type: objekt"),
    ({"guided_json": "{"}, "guided_json", "the JSON schema is not valid JSON"),
    ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    ({"guided_choice": []}, "guided_choice", "choice must be a list"),
    ({"guided_grammar": "start: missing"}, "guided_grammar", "unknown name"),
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs", "Known: json"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {}}, "structured_outputs", "got none"),
    ({"structured_outputs": {"json_object": 5}}, "structured_outputs", "true or false"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "Send one"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "ignore_eos cannot be set"),
    ({"guided_regex": "a" * 70_000}, "guided_regex", "at most 65,536"),
    ({"json_schema": {"type": "objekt"}}, "json_schema", "Invalid type: objekt"),
    ({"grammar": "root ::= missing"}, "grammar", "missing"),
    ({"ebnf": "root ::= missing"}, "ebnf", "missing"),
    ({"regex": "(a"}, "regex", "unclosed group"),
    ({"regex": "a", "grammar": 'root ::= "a"'}, "regex", "Send one"),
    ({"modalities": ["audio"]}, "modalities", "not supported"),
    ({"chat_template": "{{ messages }}"}, "chat_template", "--trust-request-chat-template"),
    ({"top_logprobs": 5}, "top_logprobs", "logprobs: true"),
    ({"logprobs": True, "top_logprobs": 21}, "logprobs", "--max-logprobs"),
    ({"logit_bias": {"9999": 1}}, "logit_bias", "257"),
    ({"logit_bias": {"5": 200}}, "logit_bias[5]", "200"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0", "-1"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options", "include_usage"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
    ({"continue_final_message": True}, "continue_final_message", "assistant"),
    ({"n": 3, "best_of": 2}, "best_of", "less than n"),
    ({"max_tokens": -1}, "max_tokens", ">= 0"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", ">= 0"),
]

BAD_TEXTS = [
    ({}, "prompt", "missing"),
    ({"prompt": ""}, None, None),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": 5}, "prompt", "string"),
    ({"prompt": ["a", 5]}, "prompt", "mixes"),
    ({"prompt": [[1, "a"]]}, "prompt", "token ids"),
    ({"prompt": [1, 300]}, "prompt", "300"),
    ({"prompt": [-1]}, "prompt", "-1"),
    ({"prompt": "a", "suffix": "b"}, "suffix", "no FIM tokens"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens", ">= 0"),
    ({"prompt": "a", "bad_words": [""]}, "bad_words", "empty"),
    ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids", "empty"),
]


@pytest.mark.parametrize(("body", "param", "text"), BAD_CHATS)
def test_bad_chat(server: Server, body: dict[str, Any], param: str, text: str) -> None:
    error = error_of(server.chat(**body), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert text in error["message"]


@pytest.mark.parametrize(("body", "param", "text"), BAD_TEXTS)
def test_bad_completion(
    server: Server, body: dict[str, Any], param: str | None, text: str | None
) -> None:
    response = server.http.post(TEXT, json={"add_special_tokens": True, **body})
    if param is None:
        assert response.status_code == 200  # an empty text becomes a prompt of one BOS token
        return
    error = error_of(response, 400)
    assert error["param"] == param
    assert text is not None
    assert text in error["message"]


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"null", b'"text"', b'{"prompt": "\xff"}', b"\xff\xfe", b"[" * 5000]
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize", "/apply-template"])
def test_not_json(server: Server, path: str, raw: bytes) -> None:
    error_of(server.http.post(path, content=raw), 400)


def test_unknown_model(server: Server) -> None:
    error = error_of(server.chat(model="gpt-4"), 404)
    assert error["code"] == "model_not_found"
    assert "counter" in error["message"]


def test_too_large_a_body(server: Server) -> None:
    raw = b'{"prompt": "' + b"x" * 10_000_000 + b'"}'
    assert error_of(server.http.post(TEXT, content=raw), 413)["code"] == "body_too_large"
    # Without Content-Length the bytes are counted as they arrive.
    chunks = (raw[i : i + 100_000] for i in range(0, len(raw), 100_000))
    try:
        response = server.http.post(TEXT, content=chunks)
    except httpx.TransportError:
        pass  # the server closed the connection early
    else:
        error_of(response, 413)
    assert server.complete().status_code == 200


def test_too_long_a_prompt(server: Server) -> None:
    error = error_of(server.complete(prompt="x" * 3000), 400)
    assert error["code"] == "context_length_exceeded"
    assert "3001" in error["message"]
    assert "2048" in error["message"]


def test_max_tokens_that_cannot_fit(server: Server) -> None:
    error = error_of(server.complete(prompt="x" * 99, max_tokens=2000), 400)
    assert error["code"] == "context_length_exceeded"
    assert "1948" in error["message"]


def test_no_such_path_or_method(server: Server) -> None:
    assert "/v2" in error_of(server.http.get("/v2"), 404)["message"]
    assert "GET" in error_of(server.http.get(TEXT), 405)["message"]


def test_template_that_raises(server: Server) -> None:
    messages = [*user("a"), {"role": "system", "content": "b"}]
    error = error_of(server.chat(messages=messages), 400)
    assert "System message must come first." in error["message"]
    assert "line 3" in error["message"]


def test_detokenize_outside_the_vocabulary(server: Server) -> None:
    error = error_of(server.http.post("/detokenize", json={"tokens": [1, 258]}), 400)
    assert "257" in error["message"]


def test_no_chat_template(tmp_path: Path) -> None:
    card = dataclasses.replace(CARD, chat_template=None)
    with running(card=card) as server:
        assert "--chat-template" in error_of(server.chat(), 400)["message"]
        assert server.complete().status_code == 200
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}{{ m.content }}|{% endfor %}")
    with running(card=card, chat_template=str(own)) as server:
        body = {"messages": user("hey")}
        assert server.http.post("/apply-template", json=body).json() == {"prompt": "hey|"}
