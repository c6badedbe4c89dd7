"""/v1/completions with a tiny model: best_of, suffix, echo, max_tokens 0."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.conftest import Server
from tests.serve.tiny_model import FIM_IDS, serving, write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder) as each:
        yield each


def choices_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    choices: list[dict[str, Any]] = response.json()["choices"]
    return choices


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


# ---- best_of -----------------------------------------------------------------------------------


def mean_logprob(choice: dict[str, Any]) -> float:
    scores = choice["logprobs"]["token_logprobs"]
    return sum(scores) / len(scores)


def test_best_of_returns_the_completions_with_the_highest_mean_logprob(server: Server) -> None:
    body = {"prompt": ["Hello", "Bye"], "max_tokens": 6, "temperature": 1.0, "seed": 5}
    every = choices_of(server.complete(**body, n=6, logprobs=0))
    expected = []
    for of_prompt in (every[:6], every[6:]):
        best = sorted(of_prompt, key=mean_logprob, reverse=True)[:2]
        expected += [choice["text"] for choice in best]
    response = server.complete(**body, n=2, best_of=6)
    found = choices_of(response)
    assert [choice["text"] for choice in found] == expected
    assert [choice["index"] for choice in found] == [0, 1, 2, 3]
    assert [choice["logprobs"] for choice in found] == [None] * 4
    assert response.json()["usage"]["completion_tokens"] == 2 * 6 * 6


def test_best_of_with_echo_and_the_openai_client(server: Server) -> None:
    best = server.openai.completions.create(
        model=server.http.get("/v1/models").json()["data"][0]["id"],
        prompt=["One", "Two"],
        best_of=3,
        max_tokens=3,
        echo=True,
    )
    assert [choice.text[:3] for choice in best.choices] == ["One", "Two"]


def test_best_of_in_a_chat(server: Server) -> None:
    assert len(choices_of(server.chat(best_of=3, max_tokens=3))) == 1


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"n": 3, "best_of": 2}, "best_of", "less than n"),
        ({"best_of": 2, "stream": True}, "best_of", "stream"),
        ({"best_of": 1000}, "best_of", "128"),
        ({"suffix": "x", "echo": True}, "echo", "suffix"),
        ({"suffix": "x", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens", "suffix"),
    ],
)
def test_what_cannot_be_combined_is_refused(
    server: Server, body: dict[str, Any], param: str, text: str
) -> None:
    response = server.complete(**body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert text in error["message"]


# ---- suffix ------------------------------------------------------------------------------------


def test_suffix_puts_the_fim_tokens_around_the_texts(server: Server) -> None:
    body = {"max_tokens": 8, "temperature": 0.0, "return_token_ids": True}
    filled = choices_of(server.complete(prompt="ab", suffix="c", **body))[0]
    prefix, suffix, middle = (FIM_IDS[part] for part in ("prefix", "suffix", "middle"))
    tokens = server.http.post("/tokenize", json={"prompt": "abc"}).json()["tokens"]
    expected = [prefix, *tokens[:2], suffix, tokens[2], middle]
    assert filled["prompt_token_ids"] == expected
    assert filled["text"] == choices_of(server.complete(prompt=expected, **body))[0]["text"]


def test_an_empty_suffix_has_no_effect(server: Server) -> None:
    body = {"max_tokens": 4, "temperature": 0.0, "return_token_ids": True}
    plain = choices_of(server.complete(prompt="ab", **body))
    assert choices_of(server.complete(prompt="ab", suffix="", **body)) == plain


# ---- echo and max_tokens 0 ---------------------------------------------------------------------


def test_a_streamed_echo_with_logprobs_equals_the_whole_one(server: Server) -> None:
    body = {"prompt": "Hello there", "echo": True, "logprobs": 2, "max_tokens": 5, "temperature": 0}
    whole = choices_of(server.complete(**body))[0]
    parts = [event["choices"][0] for event in events(server.complete(**body, stream=True))]
    assert "".join(part["text"] for part in parts) == whole["text"]
    for name, values in whole["logprobs"].items():
        streamed = [value for part in parts for value in part["logprobs"][name]]
        assert streamed == values, name


def test_max_tokens_0_with_echo_gives_the_logprobs_of_the_prompt(server: Server) -> None:
    body = {"prompt": ["Hello", "a" * 300], "echo": True, "logprobs": 1, "temperature": 0}
    one = choices_of(server.complete(**body, max_tokens=1))
    response = server.complete(**body, max_tokens=0)
    none = choices_of(response)
    for longer, choice in zip(one, none, strict=True):
        assert choice["finish_reason"] == "length"
        assert choice["text"] == longer["text"][: len(choice["text"])]
        for name, values in choice["logprobs"].items():
            assert values == longer["logprobs"][name][:-1], name
    assert response.json()["usage"]["completion_tokens"] == 0
    (event, *_) = events(server.complete(**(body | {"prompt": "Hello"}), max_tokens=0, stream=True))
    streamed, whole = event["choices"][0]["logprobs"], none[0]["logprobs"]
    assert streamed["tokens"] == whole["tokens"]
    assert streamed["token_logprobs"][1:] == pytest.approx(whole["token_logprobs"][1:], abs=1e-4)


def test_max_tokens_0_without_echo_is_empty_and_fills_the_cache(server: Server) -> None:
    prompt = "A prompt that is cached before it is continued, in blocks of sixteen tokens."
    (choice,) = choices_of(server.complete(prompt=prompt, max_tokens=0))
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    usage = server.complete(prompt=prompt, max_tokens=1).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 64


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_chat_with_max_tokens_0_is_empty_and_fills_the_cache(server: Server, field: str) -> None:
    messages = [{"role": "user", "content": f"A long message that is cached first, by {field}."}]
    response = server.chat(messages=messages, logprobs=True, **{field: 0})
    (choice,) = choices_of(response)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert choice["logprobs"]["content"] == []
    usage = response.json()["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (0, usage["prompt_tokens"])
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(server.chat(messages=messages, **{field: 0}, **options))
    deltas = [choice["delta"].get("content") for each in chunks for choice in each["choices"]]
    assert [delta for delta in deltas if delta] == []
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 0
    again = server.chat(messages=messages, max_tokens=1).json()["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] >= 32


def test_max_tokens_0_with_a_format_and_tools(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "now", "strict": True}}
    for options in (
        {"response_format": {"type": "json_object"}},
        {"tools": [tool], "tool_choice": "required"},
    ):
        (choice,) = choices_of(server.chat(max_tokens=0, **options))
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
