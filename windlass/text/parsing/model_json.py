"""Reads JSON that a model wrote, of which nothing is certain."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn


def decode(text: str) -> Any:
    """Decode JSON; strings may contain control characters.

    Raises ValueError for what is no JSON, and for values that no response can contain: NaN, Infinity, halves
    of surrogate pairs, and nesting beyond Python's limit.
    """
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse, parse_float=_finite)
        encode(value)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def encode(value: Any) -> str:
    """JSON of a value. Raises ValueError if no response can contain it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()  # a half of a surrogate pair has no UTF-8
    return text


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits} is beyond a double")
    return number


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
