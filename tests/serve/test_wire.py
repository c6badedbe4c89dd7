"""Streams to the byte: what is sent is what json.dumps makes of each chunk, whatever the text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.serve.conftest import Server, running
from tests.serve.fakes import CARD, Bytes

# The counter's letters, said otherwise. One is no text at all, and two are one character.
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
    with running(card=replace(CARD, tokenizer=Odd())) as made:
        yield made


def said(chunk: object) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


def texts() -> list[str]:
    """What each of 26 steps adds, from the letter a on."""
    lone = [PIECES[97 + i] for i in range(26)]
    lone[7], lone[8] = b"", lone[7] + lone[8]
    return [piece.decode() for piece in lone]


def envelope(body: str, kind: str) -> dict[str, Any]:
    head = json.loads(body.partition("\n\n")[0].removeprefix("data: "))
    prefix = "chatcmpl" if "chat" in kind else "cmpl"
    assert head["id"] == f"{prefix}-{NAME}"
    return {"id": head["id"], "object": kind, "created": head["created"], "model": "counter"}


@pytest.mark.parametrize("with_usage", [False, True])
def test_chat(odd: Server, with_usage: bool) -> None:
    # A prompt of 26 tokens: what comes next is the letter a.
    asked = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 26}
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    body = odd.chat(**asked, stream=True, request_id=NAME, **options).content.decode()
    common = envelope(body, "chat.completion.chunk")

    def chunk(delta: object, **ending: object) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **ending}
        nothing = {"usage": None} if with_usage else {}
        return said({**common, "choices": [choice], **nothing})

    want = chunk({"role": "assistant", "content": ""})
    want += "".join(chunk({"content": text}) for text in texts() if text)
    want += chunk({}, finish_reason="length", stop_reason=None)
    if with_usage:
        usage = json.loads(body.split("\n\n")[-3].removeprefix("data: "))["usage"]
        assert usage["completion_tokens"] == 26
        want += said({**common, "choices": [], "usage": usage})
    assert body == want + "data: [DONE]\n\n"


def test_two_texts(odd: Server) -> None:
    asked = {"prompt": "x" * 25, "n": 2, "max_tokens": 26, "request_id": NAME}
    body = odd.complete(**asked, stream=True).content.decode()
    common = envelope(body, "text_completion")
    for index in range(2):
        want = []
        for at, text in enumerate(texts()):
            ends = at == 25
            choice = {"index": index, "text": text, "logprobs": None}
            choice |= {"finish_reason": "length" if ends else None, "stop_reason": None}
            if text or at == 0 or ends:
                want.append(said({**common, "choices": [choice]}))
        lines = [f"{line}\n\n" for line in body.split("\n\n")]
        assert [line for line in lines if f'"choices":[{{"index":{index}' in line] == want


@pytest.mark.parametrize("options", [{"logprobs": True}, {"return_token_ids": True}])
def test_the_text_is_the_same_with_more_in_the_chunks(odd: Server, options: dict[str, Any]) -> None:
    asked = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 26, **options}
    lines = odd.chat(**asked, stream=True).content.decode().split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == TEXT
    assert len(chunks) == 28
