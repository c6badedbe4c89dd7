"""Decodes JSON within limits that are checked before any Python object is created.

Decoding a hostile body can take seconds and holds the GIL for that time, so the punctuation of
the text is counted first. protocol.py validates the fields.
"""

from __future__ import annotations

from typing import Any

import msgspec

from windlass.errors import RequestError
from windlass.serve import body_limits as limits
from windlass.serve.abbreviate import abbreviate

_MAX_NAME_CHARS = 100
_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1


def decode_object(raw: bytes) -> dict[str, Any]:
    """Decode a request's body, which must be a JSON object; errors name the field if possible."""
    num_keys = _count_keys(raw, "the body")
    body = _parse(raw, "the body")
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {abbreviate(body)}.")
    found = len(body) + sum(
        _count_checked_keys(value, name[:_MAX_NAME_CHARS], param=name[:_MAX_NAME_CHARS])
        for name, value in body.items()
    )
    _check_duplicates(num_keys, found, "the body")
    return body


def decode(raw: bytes, what: str) -> Any:
    """Decode JSON text from a string field; errors begin with `what`."""
    num_keys = _count_keys(raw, what)
    value = _parse(raw, what)
    _check_duplicates(num_keys, _count_checked_keys(value, what), what)
    return value


def _parse(raw: bytes, what: str) -> Any:
    """Parse; NaN, Infinity, numbers beyond a double and unpaired surrogates are errors."""
    try:
        return msgspec.json.decode(raw)
    except RecursionError:
        raise _too_deep(what) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{what} is not valid JSON: {error}.") from None


def _check_duplicates(num_keys: int, num_kept: int, what: str) -> None:
    """Raise if the parser kept fewer keys than the text has: it drops duplicate names."""
    if num_kept < num_keys:
        raise RequestError(f"{what} has an object with two fields of the same name.")


def _count_keys(raw: bytes, what: str) -> int:
    """Check the size of JSON text by its punctuation; returns the number of object keys.

    The counts are meaningless for invalid JSON, which the parser refuses.
    """
    # Without escaped quotes, every second part between quotes is outside of strings.
    unescaped = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    _check_count(what, "strings", unescaped.count(b'"') // 2, limit=limits.MAX_STRINGS)
    outside = b"".join(unescaped.split(b'"')[::2])
    num_containers = outside.count(b"[") + outside.count(b"{")
    _check_count(what, "arrays and objects", num_containers, limit=limits.MAX_CONTAINERS)
    num_values = outside.count(b",") + num_containers
    _check_count(what, "values", num_values, limit=limits.MAX_VALUES)
    return outside.count(b":")


def _check_count(what: str, kind: str, count: int, *, limit: int) -> None:
    if count > limit:
        raise RequestError(f"{what} has {count:,} {kind}; this server accepts at most {limit:,}.")


def _count_checked_keys(value: Any, what: str, param: str | None = None) -> int:
    """Check the depth and integers of a value; returns the number of object keys."""
    level: list[Any] = [value]
    num_keys, depth = 0, 1
    while level:
        kinds = set(map(type, level))
        if int in kinds:
            _check_integers(level, kinds, what, param)
        inner: list[Any] = []
        if list in kinds or dict in kinds:
            if depth > limits.MAX_DEPTH:
                raise _too_deep(what, param)
            for item in level:
                if type(item) is list:
                    inner += item
                elif type(item) is dict:
                    num_keys += len(item)
                    inner += item.values()
        level, depth = inner, depth + 1
    return num_keys


def _check_integers(level: list[Any], kinds: set[type], what: str, param: str | None) -> None:
    """Check the integers among values of some types. A prompt of token ids has thousands."""
    integers = level if kinds == {int} else [each for each in level if type(each) is int]
    if min(integers) < _MIN_INT or max(integers) > _MAX_INT:
        raise RequestError(
            f"{what} has an integer that does not fit 64 bits: integers must be at least "
            "-2**63 and less than 2**64.",
            param,
        )


def _too_deep(what: str, param: str | None = None) -> RequestError:
    return RequestError(
        f"{what} nests arrays and objects in more than {limits.MAX_DEPTH} levels, which is the "
        "limit of this server.",
        param,
    )
