"""Parses JSONL files of prompts and conversations, and reports invalid lines by number."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from windlass.errors import ConfigError, RequestError, file_errors

Messages = list[dict[str, Any]]
T = TypeVar("T")
_SHOWN = 5


def numbered_lines(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the non-empty lines, numbered from 1."""
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if line.strip():
            yield number, line


def read_bytes(path: Path, flag: str) -> bytes:
    """Read the file that the user gave with `flag`."""
    with file_errors(f"{flag} {path}"):
        return path.read_bytes()


def parse_lines(raw: bytes, parse: Callable[[bytes], T]) -> tuple[list[T], list[tuple[int, str]]]:
    """Parse all lines; returns the values, and (line number, error) of each invalid line."""
    values: list[T] = []
    invalid: list[tuple[int, str]] = []
    for number, line in numbered_lines(raw):
        try:
            values.append(parse(line))
        except RequestError as error:
            invalid.append((number, str(error)))
    return values, invalid


def raise_problems(path: Path, problems: Sequence[str]) -> None:
    """Raise if the file has invalid lines."""
    if problems:
        shown = "\n  ".join(problems[:_SHOWN])
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ConfigError(
            f"{path} has {len(problems)} invalid lines:\n  {shown}{more}\n"
            "Fix them, or skip them with --skip-bad-lines."
        )


def parse_object(line: bytes | str, such_as: str) -> dict[str, Any]:
    """Parse one line as a JSON object; raises RequestError without the line number."""
    try:
        value = json.loads(line.decode("utf-8-sig") if isinstance(line, bytes) else line)
    except UnicodeDecodeError:
        raise RequestError("is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise RequestError(f"is not JSON at column {error.colno}: {error.msg}") from None
    if not isinstance(value, dict):
        raise RequestError(f"expected an object such as {such_as}, got {value!r:.80}")
    return value


def check_messages(value: object) -> Messages:
    """Validate a conversation: a list of messages with role and content."""
    if not isinstance(value, list) or not value:
        raise RequestError("messages must be a list with at least one message", "messages")
    for message in value:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(name), str) for name in ("role", "content")
        ):
            raise RequestError(
                f"a message needs role and content as strings, got {message!r:.100}", "messages"
            )
    return value
