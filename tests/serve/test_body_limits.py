"""No body blocks the event loop: sizes are checked first, and slow work runs in threads."""

from __future__ import annotations

import dataclasses
import difflib
import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import httpx
import pytest

from tests.serve.conftest import Server, running
from tests.serve.fakes import CARD, Bytes, Options, counting
from tests.serve.test_bad_input import CHAT, TEXT, error_of, user
from windlass.core.sampling import SamplingParams
from windlass.serve import body_limits as limits
from windlass.serve import formatters
from windlass.serve.protocol import ChatRequest, CompletionRequest
from windlass.text import template_process

HANG_GUARD_S = 30


class Gated(Bytes):
    """Records the thread of each call; a text that contains GATE waits for `gate`."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.batches: list[list[str]] = []
        self.threads: list[str] = []

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return self.encode_all([text], add_special)[0]

    def encode_all(self, texts: Sequence[str], add_special: bool = True) -> list[list[int]]:
        self.batches.append(list(texts))
        self._wait("GATE" in "".join(texts))
        return [super(Gated, self).encode("x"[: len(text)], add_special) for text in texts]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        self._wait(len(ids) > 1000)
        return super().decode(ids, skip_special)

    def _wait(self, gated: bool) -> None:
        self.threads.append(threading.current_thread().name)
        if gated:
            self.entered.set()
            assert self.gate.wait(HANG_GUARD_S)


@pytest.fixture
def gated() -> Iterator[tuple[Server, Gated]]:
    tokenizer = Gated()
    with running(card=dataclasses.replace(CARD, tokenizer=tokenizer)) as server:
        try:
            yield server, tokenizer
        finally:
            tokenizer.gate.set()


LONG = "GATE" + "word " * 1000
GATED_BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "a text prompt": (TEXT, {"prompt": LONG, "max_tokens": 1}),
    "a conversation": (CHAT, {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1}),
    "forbidden words": (TEXT, {"prompt": "a", "bad_words": ["GATE"], "max_tokens": 1}),
    "/tokenize": ("/tokenize", {"prompt": LONG}),
    "/detokenize": ("/detokenize", {"tokens": [97] * 1500}),
    "an echo": (TEXT, {"prompt": [97] * 1500, "echo": True, "max_tokens": 1, "user": "x" * 20_000}),
}


@pytest.mark.parametrize("name", GATED_BODIES)
def test_health_responds_during_tokenizing(gated: tuple[Server, Gated], name: str) -> None:
    """Tokenizing ends only after /health/live has responded, so it is not on the event loop."""
    server, tokenizer = gated
    path, body = GATED_BODIES[name]
    with ThreadPoolExecutor(1) as pool:
        posted = pool.submit(httpx.post, server.url + path, json=body, timeout=2 * HANG_GUARD_S)
        assert tokenizer.entered.wait(HANG_GUARD_S)
        alive = [server.http.get("/health/live").status_code for _ in range(3)]
        assert not posted.done()
        tokenizer.gate.set()
        assert posted.result().status_code == 200
    assert alive == [200] * 3


def test_prompts_of_one_request_are_tokenized_in_one_batch(gated: tuple[Server, Gated]) -> None:
    server, tokenizer = gated
    assert server.complete(prompt=["a", "b", "c"], max_tokens=1).status_code == 200
    assert tokenizer.batches == [["a", "b", "c"]]


@pytest.mark.parametrize(
    ("path", "kind", "body"),
    [
        (TEXT, CompletionRequest, {"prompt": "a", "max_tokens": 1, "user": "x" * 20_000}),
        (CHAT, ChatRequest, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ],
)
def test_large_bodies_are_decoded_in_a_thread(
    server: Server, path: str, kind: type[CompletionRequest], body: dict[str, Any]
) -> None:
    threads = []
    read = kind.read

    def spy(raw: bytes) -> Any:
        threads.append(threading.current_thread().name)
        return read(raw)

    with mock.patch.object(kind, "read", spy):
        assert server.http.post(path, json=body).status_code == 200
    in_thread = len(json.dumps(body)) > limits.INLINE_BYTES
    assert [name.startswith("windlass-json") for name in threads] == [in_thread]


def test_log_probabilities_are_formatted_in_a_thread(server: Server) -> None:
    threads = set()
    original = formatters.prompt_logprobs

    def spy(*args: Any) -> Any:
        threads.add(threading.current_thread().name.rpartition("_")[0])
        return original(*args)

    with mock.patch.object(formatters, "prompt_logprobs", spy):
        response = server.complete(prompt="x" * 1000, prompt_logprobs=2, max_tokens=1).json()
    assert threads == {"windlass-text"}
    logprobs = response["choices"][0]["prompt_logprobs"]
    assert len(logprobs) == 1001
    assert logprobs[1]["120"] == {"logprob": -0.5, "rank": 1, "decoded_token": "x"}


def test_a_template_that_loops_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "RENDER_TIMEOUT_S", 2.0)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    source = "{% if messages | length == 5 %}" + loop + "{% endif %}{{ messages[0].content }}"
    with running(card=dataclasses.replace(CARD, chat_template=source)) as server:
        with ThreadPoolExecutor(1) as pool:
            posted = pool.submit(server.chat, messages=user("a") * 5)
            assert server.http.get("/health/live").status_code == 200
            error = error_of(posted.result(), 400)
        assert "chat template was stopped" in error["message"]
        assert server.chat(max_tokens=1).status_code == 200


# ---- refused before any work -----------------------------------------------------------------


def test_completions_are_counted_before_prompts_are_expanded(gated: tuple[Server, Gated]) -> None:
    """2,000 prompts with n=128 would become 256,000 requests."""
    server, tokenizer = gated
    with mock.patch.object(SamplingParams, "child", side_effect=AssertionError("expanded")):
        error = error_of(server.complete(prompt=["GATE"] * 2000, n=128), 400)
        assert error["param"] == "n"
        assert "256,000 completions" in error["message"]
        error_of(server.complete(prompt=[[1]] * 30_000), 400)
    assert tokenizer.batches == []


def test_a_text_that_cannot_fit_is_not_tokenized(gated: tuple[Server, Gated]) -> None:
    server, tokenizer = gated
    for path, body in {
        TEXT: {"prompt": "GATE" * 2049},
        CHAT: {"messages": [{"role": "user", "content": "GATE" * 2049}]},
        "/tokenize": {"prompt": "GATE" * 2049},
    }.items():
        error = error_of(server.http.post(path, json=body), 400)
        assert error["code"] == "context_length_exceeded"
        assert "8,192" in error["message"]  # 2,048 tokens of at most 4 characters
    assert tokenizer.batches == []


TOO_MANY: list[tuple[str, dict[str, Any], str | None, str]] = [
    (TEXT, {"prompt": [[1]] * 40_000}, None, "arrays and objects"),
    (TEXT, {"prompt": [1] * 300_000}, None, "values"),
    (TEXT, {"prompt": ["a"] * 70_000}, None, "strings"),
    (CHAT, {"stop": ["a"] * 65}, "stop", "65 items; at most 64"),
    (CHAT, {"stop": "a" * 1025}, "stop.0", "1,025 characters; at most 1,024"),
    (CHAT, {"bad_words": ["a"] * 1025}, "bad_words", "1,025 items"),
    (CHAT, {"bad_words": ["a" * 257]}, "bad_words.0", "257 characters"),
    (CHAT, {"stop_token_ids": [1] * 4097}, "stop_token_ids", "4,097 items"),
    (CHAT, {"logit_bias": dict.fromkeys(range(16_385), 1)}, "logit_bias", "16,385 items"),
    (CHAT, {"allowed_token_ids": ["a"] * 60_000}, "allowed_token_ids.0", "integer"),
    (CHAT, {"allowed_token_ids": [1] * 258, "n": 1, "cache_salt": "s" * 257}, "cache_salt", "256"),
    (CHAT, {"messages": user("a") * 4097}, "messages", "4,097 items"),
    (CHAT, {"messages": [{}] * 4000}, "messages.0.role", "missing"),
    (
        CHAT,
        {"messages": user([{"type": "text", "text": "a"}] * 4097)},
        "messages.0.content",
        "parts",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{}] * 129}]},
        "messages.0.tool_calls",
        "129 items",
    ),
    (CHAT, {"n": 129}, "n", "128"),
    (CHAT, {"guided_regex": "a" * 65_537}, "guided_regex", "65,537 characters"),
    (CHAT, {"guided_grammar": "a" * 65_537}, "guided_grammar", "65,537 characters"),
    (CHAT, {"guided_json": "1" * 65_537}, "guided_json", "65,537 characters"),
    (CHAT, {"guided_json": {"title": "a" * 65_537}}, "guided_json", "characters"),
    (CHAT, {"guided_json": "[" * 2000}, "guided_json", "64 levels"),
    (CHAT, {"guided_json": '{"a": 1, "a": 2}'}, "guided_json", "same name"),
    (CHAT, {"guided_choice": ["a"] * 4097}, "guided_choice", "4,097 items"),
    (CHAT, {"guided_choice": [1] * 4096}, "guided_choice.0", "string"),
    (CHAT, {"structured_outputs": {"choice": ["a"] * 4097}}, "structured_outputs", "4,097 choices"),
    (CHAT, {"guided_choice": ["a" * 65_537]}, "guided_choice", "65,537 characters"),
    (CHAT, {"guided_grammar": 'a ::= "b"\n' * 513}, "guided_grammar", "513 rules"),
    (CHAT, {"structured_outputs": {"regex": "a" * 65_537}}, "structured_outputs", "65,537"),
    (
        CHAT,
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"a": "b" * 66_000}},
            }
        },
        "response_format",
        "characters",
    ),
    (TEXT, {"prompt": "x", "n": 128, "allowed_token_ids": [97] * 50_000}, "n", "4,194,304"),
    (TEXT, {"prompt": ["x" * 999] * 800}, "prompt", "800,000 prompt tokens"),
    (
        TEXT,
        {"prompt": "x" * 1600, "n": 128, "prompt_logprobs": 20, "max_tokens": 1},
        "prompt_logprobs",
        "4,303,488",
    ),
    (CHAT, {"n": 128, "logprobs": True, "top_logprobs": 20}, "logprobs", "at most 4,194,304"),
    ("/detokenize", {"tokens": [97] * 2049}, "tokens", "2,049 ids; at most 2,048"),
    (
        CHAT,
        {"messages": user("a"), "chat_template_kwargs": {"a": 2**64}},
        "chat_template_kwargs",
        "64 bits",
    ),
]


@pytest.mark.parametrize(("path", "body", "param", "text"), TOO_MANY)
def test_counts_and_characters_are_bounded(
    server: Server, path: str, body: dict[str, Any], param: str | None, text: str
) -> None:
    if path == CHAT:
        body = {"messages": user("a"), **body}
    error = error_of(server.http.post(path, json=body), 400)
    assert error["param"] == param
    assert text in error["message"]
    assert len(error["message"]) < 1000


def test_a_body_within_the_limits_is_accepted(server: Server) -> None:
    body = {
        "stop": ["?" * limits.MAX_STOP_CHARS] * limits.MAX_STOP_STRINGS,
        "bad_words": ["bad"] * limits.MAX_BAD_WORDS,
        "stop_token_ids": [1] * limits.MAX_STOP_TOKEN_IDS,
        "allowed_token_ids": list(range(97, 123)) * 1000,
        "logit_bias": {"97": -1.5},
        "messages": user([{"type": "text", "text": "a"}] * 100) * 2,
        "max_tokens": 1,
        "n": 2,
    }
    assert server.http.post(CHAT, json=body).status_code == 200


@pytest.mark.parametrize("name", ["a" * 3_000_000, "é" * 100_000, "temperatur" * 100])
def test_long_names_are_neither_compared_nor_repeated(server: Server, name: str) -> None:
    bad = {name: 1, "temperature": "hot"}
    with mock.patch.object(difflib, "get_close_matches", side_effect=AssertionError("compared")):
        assert server.complete(**{name: 1}).status_code == 200
        error_of(server.complete(**bad), 400)
        with running(unknown_fields="error") as strict:
            error = error_of(strict.complete(**{name: 1}), 400)
    assert "unknown field" in error["message"]
    assert len(error["message"]) < 2000
    assert len(error["param"]) <= 100


@pytest.mark.parametrize("field", ["model", "user", "temperature", "tools", "prompt", "request_id"])
@pytest.mark.parametrize("value", ["x" * 1_000_000, ["x" * 1_000_000], {"x" * 1_000_000: 1}])
def test_errors_never_repeat_megabytes(server: Server, field: str, value: object) -> None:
    response = server.complete(**{field: value})
    assert response.status_code in (200, 400, 404)
    assert response.status_code == 200 or len(response.content) < 2000


def test_a_full_queue_of_prompts_is_still_possible() -> None:
    """The limit on completions is the number of slots plus the queue, not less."""
    with running(counting(Options(max_num_seqs=4)), max_num_queued_reqs=4) as server:
        assert server.complete(prompt=["a"] * 4, n=2, max_tokens=1).status_code == 200
        assert "9 completions" in error_of(server.complete(prompt=["a"] * 9), 400)["message"]
