"""The API as the OpenAI client sees it, and the exact JSON where it matters."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from openai import NotFoundError

from tests.serve.conftest import CARD, Server, running, wait_until

HELLO = [{"role": "user", "content": "Hello"}]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end with [DONE]."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def num_cached(server: Server, **body: object) -> int:
    """Send a fixed prompt; returns the number of its cached tokens."""
    prompt = "a long prompt whose blocks are kept " * 4
    usage = server.complete(prompt=prompt, max_tokens=1, **body).json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


def test_chat(server: Server) -> None:
    response = server.openai.chat.completions.create(
        model="counter", messages=HELLO, max_completion_tokens=6
    )
    choice = response.choices[0]
    assert choice.message.content == "zabcde"
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert response.object == "chat.completion"
    assert response.usage.prompt_tokens == 25
    assert response.usage.completion_tokens == 6


def test_chat_stream_says_the_same(server: Server) -> None:
    stream = server.openai.chat.completions.create(
        model="counter",
        messages=HELLO,
        max_tokens=6,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "zabcde"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 6


def test_chat_chunks_have_the_exact_shape(server: Server) -> None:
    chunks = events(server.chat(max_tokens=1, stream=True))
    assert [sorted(chunk) for chunk in chunks] == [
        ["choices", "created", "id", "model", "object", "system_fingerprint"]
    ] * 3
    first, middle, last = (chunk["choices"][0] for chunk in chunks)
    assert first == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    assert middle["delta"] == {"content": "w"}
    assert last["delta"] == {}
    assert last["finish_reason"] == "length"
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_completion_defaults_to_sixteen_tokens(server: Server) -> None:
    response = server.openai.completions.create(model="counter", prompt="Hi")
    assert response.choices[0].text == "defghijklmnopqrs"
    assert response.object == "text_completion"


def test_chat_defaults_to_the_rest_of_the_context(server: Server) -> None:
    body = server.chat().json()
    assert body["usage"]["total_tokens"] == 2048
    assert body["choices"][0]["finish_reason"] == "length"


def test_the_eos_token_is_not_text(server: Server) -> None:
    choice = server.chat(messages=[{"role": "user", "content": "EOS"}]).json()["choices"][0]
    assert choice["message"]["content"] == "xyz"
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_times_n(server: Server, stream: bool) -> None:
    response = server.complete(prompt=["a", "bc"], n=2, max_tokens=3, stream=stream)
    texts = ["", "", "", ""]
    for body in events(response) if stream else [response.json()]:
        for choice in body["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["cde", "cde", "def", "def"]


def test_three_choices_in_one_chat_stream(server: Server) -> None:
    chunks = events(server.chat(n=3, max_tokens=4, stream=True))
    for index in range(3):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "wxyz"
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]


def test_usage_counts_a_prompt_once(server: Server) -> None:
    usage = server.complete(prompt="abcd", n=3, max_tokens=2).json()["usage"]
    assert usage["prompt_tokens"] == 5
    assert usage["completion_tokens"] == 6
    assert usage["total_tokens"] == 11


def test_usage_reports_cached_tokens(server: Server) -> None:
    assert [num_cached(server), num_cached(server)] == [0, 144]
    assert num_cached(server, cache_salt="other") == 0


def test_usage_in_every_chunk(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(server.complete(max_tokens=3, stream=True, stream_options=options))
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2, 3, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_over_several_tokens(server: Server, stream: bool) -> None:
    response = server.complete(max_tokens=100, stop=["nothing", "ghi"], stream=stream)
    choices = [a["choices"][0] for a in (events(response) if stream else [response.json()])]
    assert "".join(choice["text"] for choice in choices) == "def"
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] == "ghi"
    if not stream:
        assert response.json()["usage"]["completion_tokens"] == 6


def test_include_stop_str_in_output(server: Server) -> None:
    body = server.complete(stop="ghi", include_stop_str_in_output=True).json()
    assert body["choices"][0]["text"] == "defghi"


def test_stop_token_id(server: Server) -> None:
    choice = server.complete(stop_token_ids=[ord("g")], return_token_ids=True).json()["choices"][0]
    assert choice["text"] == "def"
    assert choice["stop_reason"] == ord("g")
    assert choice["token_ids"] == list(b"defg")
    assert choice["prompt_token_ids"] == [256, *b"Hi"]


def test_chat_logprobs(server: Server) -> None:
    choice = server.chat(max_tokens=2, logprobs=True, top_logprobs=2).json()["choices"][0]
    first = choice["logprobs"]["content"][0]
    assert first["token"] == "w"
    assert first["logprob"] == -0.5
    assert first["bytes"] == [ord("w")]
    assert first["top_logprobs"][1] == {"token": "!", "logprob": -9999.0, "bytes": [33]}
    assert len(choice["logprobs"]["content"]) == 2


def test_completion_logprobs_with_echo(server: Server) -> None:
    choice = server.complete(max_tokens=2, logprobs=1, echo=True).json()["choices"][0]
    assert choice["text"] == "Hide"
    assert choice["logprobs"]["tokens"] == ["<s>", "H", "i", "d", "e"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert choice["logprobs"]["text_offset"] == [0, 3, 4, 5, 6]
    assert choice["logprobs"]["top_logprobs"][1]["H"] == -0.5


def test_streamed_logprobs_equal_unstreamed_ones(server: Server) -> None:
    request = {"max_tokens": 5, "logprobs": 0, "stop": "fgh"}
    whole = server.complete(**request).json()["choices"][0]["logprobs"]
    chunks = events(server.complete(**request, stream=True))
    for name in whole:
        parts = [chunk["choices"][0]["logprobs"][name] for chunk in chunks]
        assert [item for part in parts for item in part] == whole[name]


def test_prompt_logprobs(server: Server) -> None:
    choice = server.complete(prompt="Hi", max_tokens=1, prompt_logprobs=1).json()["choices"][0]
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    assert second["72"] == {"logprob": -0.5, "rank": 1, "decoded_token": "H"}
    assert "105" in third
    body = server.chat(max_tokens=1, prompt_logprobs=0).json()
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]


def test_token_prompts(server: Server) -> None:
    assert server.complete(prompt=[1, 2, 3], max_tokens=2).json()["choices"][0]["text"] == "de"
    choices = server.complete(prompt=[[1], [1, 2]], max_tokens=2).json()["choices"]
    assert [choice["text"] for choice in choices] == ["bc", "cd"]


def test_truncate_prompt_tokens(server: Server) -> None:
    long = "x" * 5000
    body = server.complete(prompt=long, truncate_prompt_tokens=10, max_tokens=1).json()
    assert body["usage"]["prompt_tokens"] == 10
    body = server.complete(prompt=long, truncate_prompt_tokens=-1, max_tokens=48).json()
    assert body["usage"]["prompt_tokens"] == 2000


def test_continue_final_message(server: Server) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Well, "}]
    body = {"messages": messages, "continue_final_message": True}
    prompt = server.http.post("/apply-template", json=body).json()["prompt"]
    assert prompt == "<user>Hello</><assistant>Well, "


def test_ignored_and_neutral_fields_are_accepted(server: Server) -> None:
    response = server.chat(
        max_tokens=1,
        user="me",
        metadata={"a": "b"},
        store=False,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        temperature=None,
        service_tier="auto",
    )
    assert response.status_code == 200


def test_a_response_message_can_be_sent_back(server: Server) -> None:
    """The OpenAI client adds empty fields to a message, which the next request contains."""
    client = server.openai.chat.completions
    message = client.create(model="counter", messages=HELLO, max_tokens=2).choices[0].message
    again = [*HELLO, message.model_dump(), {"role": "user", "content": [_text("and"), _text("x")]}]
    assert client.create(model="counter", messages=again, max_tokens=1).choices


def test_a_reused_request_id_does_not_mix_responses(server: Server) -> None:
    request = {"prompt": "SLOW", "max_tokens": 900, "stream": True, "request_id": "x"}
    with server.http.stream("POST", "/v1/completions", json=request) as first:
        lines = first.iter_lines()
        assert '"text":"f"' in next(lines)
        assert server.complete(request_id="x", max_tokens=3).json()["choices"][0]["text"] == "def"
    again = server.complete(request_id="x", max_tokens=3).json()
    assert again["id"] == "cmpl-x"
    assert again["choices"][0]["text"] == "def"


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def test_tokenize_and_back(server: Server) -> None:
    tokenized = server.http.post(
        "/tokenize", json={"prompt": "né", "return_token_strs": True}
    ).json()
    assert tokenized["tokens"] == [256, 110, 195, 169]
    assert tokenized["count"] == 4
    assert tokenized["max_model_len"] == 2048
    assert tokenized["token_strs"][:2] == ["<s>", "n"]
    back = server.http.post("/detokenize", json={"tokens": tokenized["tokens"][1:]}).json()
    text = "".join(tokenized["token_strs"][1:])
    assert back == {"prompt": text, "content": text}
    chat = server.http.post("/tokenize", json={"messages": HELLO}).json()
    text = server.http.post("/apply-template", json={"messages": HELLO}).json()["prompt"]
    assert bytes(chat["tokens"]).decode() == text == "<user>Hello</><assistant>"


def test_operations(server: Server) -> None:
    get = server.http.get
    model = get("/v1/models").json()["data"][0]
    assert model["id"] == "counter"
    assert model["max_model_len"] == 2048
    for path in ("/health", "/health/live", "/health/ready", "/health/generate", "/ping"):
        assert get(path).json()["status"] == "ok", path
    assert get("/version").json()["version"]
    assert get("/load").json()["server_load"] == 0
    assert server.http.post("/reset_prefix_cache").status_code == 403


def test_one_model(server: Server) -> None:
    found = server.openai.models.retrieve("counter")
    (listed,) = server.openai.models.list().data
    assert found == listed
    assert (found.id, found.object, found.owned_by) == ("counter", "model", "windlass")
    for name in ("other", "org/other", "counter/x", "Counter", "cöunter", "..."):
        with pytest.raises(NotFoundError, match="does not exist here") as refused:
            server.openai.models.retrieve(name)
        assert repr(name) in refused.value.message
    request = {"model": "other", "prompt": "x"}
    usual = server.http.post("/v1/completions", json=request).json()
    assert server.http.get("/v1/models/other").json() == usual
    assert server.http.get("/v1/models/").json() == server.http.get("/v1/models").json()
    assert server.http.post("/v1/models/counter").status_code == 405


def test_a_model_whose_name_has_slashes() -> None:
    with running(card=replace(CARD, name="org/counter")) as server:
        assert server.openai.models.retrieve("org/counter").id == "org/counter"
        for path in ("org/counter", "org%2Fcounter"):
            assert server.http.get(f"/v1/models/{path}").json()["id"] == "org/counter"
        assert server.http.get("/v1/models/counter").status_code == 404


def test_a_model_may_have_several_names() -> None:
    with running(card=replace(CARD, aliases=("gpt-4o", "b"))) as server:
        assert [model.id for model in server.openai.models.list().data] == [
            "counter",
            "gpt-4o",
            "b",
        ]
        messages = [{"role": "user", "content": "Hi"}]
        reply = server.openai.chat.completions.create(
            model="gpt-4o",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=2,
        )
        assert reply.model == "counter"
        tags = server.http.get("/api/tags").json()["models"]
        assert [item["name"] for item in tags] == ["counter", "gpt-4o", "b"]


def test_keys_and_origins() -> None:
    with running(api_key=("one", "two"), allowed_origins=("http://shop.example",)) as server:
        get = server.http.get
        assert get("/health/ready").status_code == 200
        for path in (
            "/v1/models",
            "/v1/models/counter",
            "/metrics",
            "/nothing",
            "/health/../v1/models",
        ):
            refused = get(path)
            assert refused.status_code == 401, path
            assert refused.json()["error"]["type"] == "authentication_error"
        assert get("/v1/models", headers={"Authorization": "Bearer three"}).status_code == 401
        assert get("/v1/models", headers={"Authorization": "Basic two"}).status_code == 401
        assert get("/v1/models", headers={"Authorization": "Bearer two"}).status_code == 200
        preflight = {"Origin": "http://shop.example", "Access-Control-Request-Method": "POST"}
        allowed = server.http.options("/v1/chat/completions", headers=preflight)
        assert allowed.headers["access-control-allow-origin"] == "http://shop.example"


def test_keys_never_share_cached_blocks() -> None:
    """Not even with equal salts: a key could otherwise probe the prompts of another key."""
    with running(api_key=("one", "two")) as server:
        found: dict[str, list[int]] = {}
        for key in ("one", "two"):
            server.http.headers["Authorization"] = f"Bearer {key}"
            salts = ({}, {}, {"cache_salt": ""}, {"cache_salt": "ours"}, {"cache_salt": "ours"})
            found[key] = [num_cached(server, **salt) for salt in salts]
    assert found == {"one": [0, 144, 144, 0, 144], "two": [0, 144, 144, 0, 144]}


def test_stream_interval_and_forced_usage_and_ids() -> None:
    with running(
        stream_interval=4, enable_force_include_usage=True, enable_request_id_headers=True
    ) as server:
        response = server.complete(max_tokens=10, stream=True, request_id="mine")
        chunks = events(response)
        texts = [c["choices"][0]["text"] for c in chunks[:-1]]
        assert texts == ["d", "efgh", "ijkl", "m"]
        assert chunks[-1]["usage"]["completion_tokens"] == 10
        assert response.headers["x-request-id"] == chunks[0]["id"] == "cmpl-mine"
        for wrong in ("böse", "two\nlines"):
            refused = server.complete(max_tokens=10, stream=True, request_id=wrong)
            assert refused.status_code == 400
            assert "cannot be sent back as X-Request-Id" in refused.json()["error"]["message"]
        wait_until(lambda: server.metric("num_requests_running") == 0)


def test_usage_reports_draft_tokens(server: Server) -> None:
    """One token, then two per step with one accepted and one rejected draft; at the end one fits."""
    usage = server.complete(prompt="DRAFT", max_tokens=7).json()["usage"]
    details = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 2}
    assert usage["completion_tokens"] == 7
    assert usage["completion_tokens_details"] == details
    body = {"prompt": "DRAFT", "max_tokens": 60, "stop": "f", "stream": True}
    chunks = events(server.complete(**body, stream_options={"include_usage": True}))
    assert chunks[-1]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    usage = server.complete(prompt="none", max_tokens=7).json()["usage"]
    assert "completion_tokens_details" not in usage
    wait_until(lambda: server.metric("spec_decode_num_tokens_saved_total") > 0)
    assert server.metric("spec_decode_acceptance_length") == pytest.approx(2.0, abs=0.3)
