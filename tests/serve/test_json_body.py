"""JSON is counted before it is decoded; refused values are errors that name the field."""

from __future__ import annotations

import json
import re
from typing import Any
from unittest import mock

import msgspec
import pytest

from windlass.errors import RequestError
from windlass.serve import body_limits as limits
from windlass.serve.json_body import decode, decode_object


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"a": 'quotes " and \\ and \\" and [{,:}]', "b": [1, -2.5, True, None]},
        {'key "quoted"': {"inner\\": [{"a": 1}, {"a": 2}]}},
        {"a": "\\" * 7 + '"', "b": "\u00e9\U0001f600", "c": -(2**63), "d": 2**64 - 1},
        {"deep": [[[[{"x": [[]]}]]]]},
    ],
)
def test_valid_json_decodes_like_the_standard_library(value: dict[str, Any]) -> None:
    for options in ({}, {"ensure_ascii": False}, {"indent": 2}):
        raw = json.dumps(value, **options).encode()
        assert decode_object(raw) == value


@pytest.mark.parametrize(
    ("raw", "param", "text"),
    [
        (b'{"n": 1, "n": 2}', None, "two fields of the same name"),
        (b'{"a": {"b": [{"c": 1, "c": 1}]}}', None, "two fields of the same name"),
        (b'{"n": 18446744073709551616}', "n", "less than 2**64"),
        (b'{"a": {"b": [-9223372036854775809]}}', "a", "64 bits"),
        (b'{"n": ' + b"9" * 5000 + b"}", None, "not valid JSON"),
        (b'{"t": NaN}', None, "not valid JSON"),
        (b'{"t": Infinity}', None, "not valid JSON"),
        (b'{"t": -Infinity}', None, "not valid JSON"),
        (b'{"t": 1e999}', None, "not valid JSON"),
        (b'{"s": "\\ud800"}', None, "not valid JSON"),
        (b'{"s": "\\udc00\\ud800 and more"}', None, "not valid JSON"),
        (b'{"s": "\xed\xa0\x80"}', None, "not valid JSON"),
        (b'{"s": "\xff"}', None, "not valid JSON"),
        (b'\xef\xbb\xbf{"bom": 1}', None, "not valid JSON"),
        (b"[]", None, "must be a JSON object, got []"),
        (b"[1, 2]", None, "an array of 2 values"),
        (b"", None, "not valid JSON"),
    ],
)
def test_refused_bodies(raw: bytes, param: str | None, text: str) -> None:
    with pytest.raises(RequestError, match=re.escape(text)) as caught:
        decode_object(raw)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"[" + b"[]," * limits.MAX_CONTAINERS + b"[]]", "arrays and objects"),
        (b"[" + b"1," * (limits.MAX_VALUES + 1) + b"1]", "values"),
        (b"[" + b'"",' * limits.MAX_STRINGS + b'""]', "strings"),
        (b'{"a": [' + b'"a\\"b",' * limits.MAX_STRINGS + b'""]}', "strings"),
    ],
)
def test_large_bodies_are_refused_before_parsing(raw: bytes, text: str) -> None:
    with (
        mock.patch.object(msgspec.json, "decode", side_effect=AssertionError("it was parsed")),
        pytest.raises(RequestError, match=f"the body has [0-9,]+ {text}; this server accepts"),
    ):
        decode_object(raw)


def test_punctuation_in_strings_does_not_count() -> None:
    text = '[{,":}]\\' * limits.MAX_VALUES
    assert decode_object(json.dumps({"prompt": text}).encode()) == {"prompt": text}


@pytest.mark.parametrize("depth", [limits.MAX_DEPTH + 1, 5000])
def test_depth_is_bounded(depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    with pytest.raises(RequestError, match=f"more than {limits.MAX_DEPTH} levels"):
        decode_object(b'{"a": ' + nested + b"}")
    with pytest.raises(RequestError, match=r"the JSON schema nests"):
        decode(nested, "the JSON schema")
    shallow = b"[" * limits.MAX_DEPTH + b"]" * limits.MAX_DEPTH
    assert decode_object(b'{"a": ' + shallow + b"}")
