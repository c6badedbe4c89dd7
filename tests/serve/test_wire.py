"""Byte-exact streams: each event equals the output of json.dumps, for any text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.serve.conftest import Server, running
from tests.serve.fakes import CARD, Bytes
from windlass.version import __version__

# Byte sequences instead of the counter's letters. One is empty, and two form one character.
ODD = [b'"', b"\\", b"\n", "é".encode(), b"\x00", "\u2028".encode(), b"", "🎉".encode()[:2]]
ODD += ["🎉".encode()[2:], b'"\\u0000"', b"</>", b"\x7f"]
PIECES = dict.fromkeys(range(258), b"-") | {97 + i: piece for i, piece in enumerate(ODD)}
TEXT = b"".join(PIECES[97 + i] for i in range(26)).decode()
NAME = 'x"\0"y'


class Odd(Bytes):
    def byte_pieces(self, skip_special: bool) -> Mapping[int, bytes]:  # noqa: ARG002
        return PIECES


@pytest.fixture(scope="module")
def odd() -> Iterator[Server]:
    with running(card=replace(CARD, tokenizer=Odd())) as server:
        yield server


def event(chunk: object) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


def texts() -> list[str]:
    """The text of each of 26 steps, beginning with the letter a."""
    steps = [PIECES[97 + i] for i in range(26)]
    steps[7], steps[8] = b"", steps[7] + steps[8]
    return [piece.decode() for piece in steps]


def envelope(body: str, kind: str) -> dict[str, Any]:
    head = json.loads(body.partition("\n\n")[0].removeprefix("data: "))
    prefix = "chatcmpl" if "chat" in kind else "cmpl"
    assert head["id"] == f"{prefix}-{NAME}"
    return {
        "id": head["id"],
        "object": kind,
        "created": head["created"],
        "model": "counter",
        "system_fingerprint": f"windlass-{__version__}",
    }


@pytest.mark.parametrize("with_usage", [False, True])
def test_chat(odd: Server, with_usage: bool) -> None:
    # A prompt of 26 tokens: the first generated token is the letter a.
    request = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 26}
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    body = odd.chat(**request, stream=True, request_id=NAME, **options).content.decode()
    common = envelope(body, "chat.completion.chunk")

    def chunk(delta: object, **finish: object) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **finish}
        usage = {"usage": None} if with_usage else {}
        return event({**common, "choices": [choice], **usage})

    expected = chunk({"role": "assistant", "content": ""})
    expected += "".join(chunk({"content": text}) for text in texts() if text)
    expected += chunk({}, finish_reason="length", stop_reason=None)
    if with_usage:
        usage = json.loads(body.split("\n\n")[-3].removeprefix("data: "))["usage"]
        assert usage["completion_tokens"] == 26
        expected += event({**common, "choices": [], "usage": usage})
    assert body == expected + "data: [DONE]\n\n"


def test_two_texts(odd: Server) -> None:
    request = {"prompt": "x" * 25, "n": 2, "max_tokens": 26, "request_id": NAME}
    body = odd.complete(**request, stream=True).content.decode()
    common = envelope(body, "text_completion")
    for index in range(2):
        expected = []
        for at, text in enumerate(texts()):
            is_last = at == 25
            choice = {"index": index, "text": text, "logprobs": None}
            choice |= {"finish_reason": "length" if is_last else None, "stop_reason": None}
            if text or at == 0 or is_last:
                expected.append(event({**common, "choices": [choice]}))
        lines = [f"{line}\n\n" for line in body.split("\n\n")]
        assert [line for line in lines if f'"choices":[{{"index":{index}' in line] == expected


@pytest.mark.parametrize("options", [{"logprobs": True}, {"return_token_ids": True}])
def test_logprobs_and_token_ids_do_not_change_the_text(
    odd: Server, options: dict[str, Any]
) -> None:
    request = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 26, **options}
    lines = odd.chat(**request, stream=True).content.decode().split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == TEXT
    assert len(chunks) == 28
