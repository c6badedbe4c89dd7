"""Incremental detokenisation: never half a character, never part of a stop string."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.fakes import ByteTokenizer
from windlass.core.sampling import SamplingParams
from windlass.core.types import NewRequest, Output
from windlass.text.completion import Completion
from windlass.text.stream import TextStream


def pieces(text: str, sizes: list[int] | None = None, **params) -> tuple[list[str], TextStream]:
    """Stream with a tokenizer that has byte pieces, and check against one without them."""
    expected, _ = stream_text(text, sizes, ByteTokenizer(), **params)
    out, stream = stream_text(text, sizes, ByteTokenizer(pieces=True), **params)
    assert out == expected
    return out, stream


def stream_text(
    text: str, sizes: list[int] | None, tokenizer: ByteTokenizer, **params
) -> tuple[list[str], TextStream]:
    stream = TextStream(tokenizer, SamplingParams(**params))
    ids = tokenizer.encode(text)
    out, at = [], 0
    for size in sizes or [1] * len(ids):
        out.append(stream.push(ids[at : at + size], last=at + size >= len(ids)).text)
        at += size
        if stream.stopped_by is not None:
            break
    return out, stream


def test_a_character_of_four_bytes_is_sent_whole() -> None:
    out, _ = pieces("a🎉é日")
    assert "".join(out) == "a🎉é日"
    assert all("\ufffd" not in piece for piece in out)
    assert out[:6] == ["a", "", "", "", "🎉", ""]


@pytest.mark.parametrize("byte_pieces", [False, True])
def test_an_incomplete_character_is_replaced_at_the_end(byte_pieces: bool) -> None:
    stream = TextStream(ByteTokenizer(pieces=byte_pieces), SamplingParams())
    assert stream.push([0xF0, 0x9F]).text == ""
    assert stream.push([], last=True).text == "\ufffd"


@given(st.lists(st.sampled_from([*b"ab", *"é日🎉".encode(), 0xFF, 0x80]), max_size=30))
def test_any_bytes_decode_as_with_an_incremental_decoder(ids: list[int]) -> None:
    stream = TextStream(ByteTokenizer(pieces=True), SamplingParams())
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in ids:
        assert stream.push([token]).text == decoder.decode(bytes([token]))
    assert stream.push([], last=True).text == decoder.decode(b"", final=True)
    assert stream.text == bytes(ids).decode(errors="replace")


def test_a_stop_string_across_tokens_is_never_sent() -> None:
    out, stream = pieces("one two STOP three", stop=["STOP"])
    assert "".join(out) == "one two "
    assert stream.stopped_by == "STOP"


def test_a_stop_string_can_be_included() -> None:
    out, _ = pieces("one STOP two", stop=["STOP"], include_stop_str_in_output=True)
    assert "".join(out) == "one STOP"


def test_the_first_of_several_stop_strings_ends_the_text() -> None:
    _, stream = pieces("ab cd ef", stop=["ef", "cd"])
    assert (stream.text, stream.stopped_by) == ("ab ", "cd")


def test_stop_strings_before_min_tokens_are_ignored() -> None:
    _, stream = pieces("x.y.z", stop=["."], min_tokens=3)
    assert stream.text == "x.y"


def test_a_prefix_of_a_stop_string_is_sent_at_the_end() -> None:
    out, stream = pieces("wait: STO", stop=["STOP"])
    assert "".join(out) == "wait: STO"
    assert stream.stopped_by is None


@given(
    text=st.text(max_size=40),
    stops=st.lists(st.text(min_size=1, max_size=4), max_size=3),
    data=st.data(),
)
def test_any_chunking_gives_the_same_text(text: str, stops: list[str], data) -> None:
    ids = ByteTokenizer().encode(text)
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=len(ids), max_size=len(ids)))
    by_one, first = pieces(text, stop=stops) if ids else ([], None)
    by_some, second = pieces(text, sizes, stop=stops) if ids else ([], None)
    assert "".join(by_one) == "".join(by_some)
    if first is not None and second is not None:
        assert first.stopped_by == second.stopped_by
        assert not any(stop in "".join(by_one) for stop in stops)


def completion(**params) -> Completion:
    request = NewRequest("r", [1], SamplingParams(**params))
    return Completion(0, request, ByteTokenizer())


def test_a_stop_token_ends_the_text_and_counts_as_a_token() -> None:
    one = completion(stop_token_ids=[46])
    one.feed(Output("r", [72, 105]))
    last = one.feed(Output("r", [46], finish="stop", stop_token=46))
    assert (one.text, one.tokens, last.stop_reason) == ("Hi", [72, 105, 46], 46)


def test_tokens_after_a_stop_string_are_dropped() -> None:
    one = completion(stop=["b"])
    delta = one.feed(Output("r", list(b"abcd")))
    assert (one.text, one.tokens, delta.finish_reason) == ("a", [97, 98], "stop")
