"""Parsing of streamed responses."""

from __future__ import annotations

import json

import pytest

from windlass.tools.load.stream import ResponseStream, StreamBroken, error_text


def sse(*values: object, end: str = "\n\n") -> bytes:
    return b"".join(b"data: " + json.dumps(value).encode() + end.encode() for value in values)


def chat(text: str | None, finish: str | None = None, **more: object) -> dict[str, object]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}], **more}


CHAT = (
    sse({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, chat("On"), chat("ce"))
    + sse(
        chat(None, "stop"), {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}}
    )
    + b"data: [DONE]\n\n"
)


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_stream_is_parsed_with_any_split(size: int) -> None:
    stream = ResponseStream()
    for at in range(0, len(CHAT), size):
        stream.feed(CHAT[at : at + size], float(at))
    assert stream.is_done
    assert "".join(stream.texts) == "Once"
    assert len(stream.times) == 2  # the role and the end contain no token
    assert stream.num_output == 4
    assert stream.tokens() == (2, 2)  # distributed evenly without counts per chunk
    assert stream.num_cached is None


def test_counts_in_every_chunk_are_used() -> None:
    stream = ResponseStream()
    for count, text in ((1, "a"), (4, "bcd"), (5, "e")):
        stream.feed(sse(chat(text, usage={"completion_tokens": count})), float(count))
    assert stream.tokens() == (1, 3, 1)


def test_completions_reasoning_and_comments() -> None:
    stream = ResponseStream()
    stream.feed(b": ping\r\nevent: x\r\n" + sse({"choices": [{"text": "a"}]}, end="\r\n\r\n"), 1.0)
    stream.feed(sse({"choices": [{"delta": {"reasoning_content": "b"}}]}), 2.0)
    details = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}
    stream.feed(sse({"choices": [{"text": "", "finish_reason": "stop"}], "usage": details}), 3.0)
    assert stream.times == [1.0, 2.0]
    assert stream.num_cached == 8


def test_a_response_without_text_has_the_time_of_its_end() -> None:
    stream = ResponseStream()
    stream.feed(sse(chat("", "length", usage={"prompt_tokens": 1, "completion_tokens": 1})), 3.0)
    assert stream.times == [3.0]
    assert stream.tokens() == (1,)
    assert ResponseStream().tokens() == ()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"data: {half\n", "cannot be parsed"),
        (b"data: [1]\n", "cannot be parsed"),
        (b'data: {"error": {"message": "too hot", "code": 500}}\n', "too hot"),
        (b'error: {"message": "too cold"}\n', "too cold"),
    ],
)
def test_errors_and_invalid_chunks_raise(data: bytes, message: str) -> None:
    with pytest.raises(StreamBroken, match=message):
        ResponseStream().feed(data, 0.0)


def test_error_messages_in_one_line() -> None:
    assert error_text(b'{"error": {"message": "a\\n b"}}') == "a b"
    assert error_text(b'{"detail": "no"}') == "no"
    assert error_text(b"<html>\xff") == "<html>\ufffd"
    assert error_text(b"") == "empty response"
