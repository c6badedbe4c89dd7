"""Reads requests from files: JSONL prompts, traces with timestamps, ShareGPT conversations.

Invalid lines are reported by number. Arrival times are decided in arrivals.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from windlass.errors import ConfigError, RequestError
from windlass.tools.common.jsonl import check_messages, numbered_lines, parse_object
from windlass.tools.common.requests import Message, TextRequest
from windlass.tools.common.text_workload import Sizes
from windlass.tools.common.texts import Writer

_OUTPUT_KEYS = ("max_tokens", "output_tokens", "output_length", "output_len")
_DEFAULT_OUTPUT = 128
_HASH_TOKENS = 512  # tokens per entry of hash_ids in a trace without texts


@dataclass(frozen=True, slots=True)
class RequestFile:
    """Requests of a file, and the errors of its invalid lines."""

    requests: list[TextRequest]
    problems: list[str]


def read_request_file(
    name: str, path: Path, sizes: Sizes, writer: Writer, seed: str
) -> RequestFile:
    """Read up to `num_prompts` requests; `name` is a key of FILE_FORMATS."""
    try:
        made = FILE_FORMATS[name](path, sizes, writer, seed)
    except OSError as error:
        raise ConfigError(f"--dataset-path {path}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--dataset-path {path}: is not UTF-8: {error}.") from error
    if not made.requests and not made.problems:
        raise ConfigError(f"--dataset-path {path}: has no request.")
    return made


def _custom(path: Path, sizes: Sizes, writer: Writer, seed: str) -> RequestFile:
    def read(entry: dict[str, Any]) -> TextRequest:
        if not _has_text(entry):
            raise RequestError('has neither "prompt" nor "messages"')
        return _request(entry, sizes, writer, seed)

    return _jsonl(path, sizes, read)


def _timed_trace(path: Path, sizes: Sizes, writer: Writer, seed: str) -> RequestFile:
    def read(entry: dict[str, Any]) -> TextRequest:
        if "timestamp" not in entry:
            raise RequestError('has no "timestamp"')
        return _request(entry, sizes, writer, seed)

    made = _jsonl(path, sizes, read)
    return RequestFile(sorted(made.requests, key=lambda request: request.at), made.problems)


def _jsonl(path: Path, sizes: Sizes, read: Callable[[dict[str, Any]], TextRequest]) -> RequestFile:
    requests: list[TextRequest] = []
    problems: list[str] = []
    for number, line in numbered_lines(path.read_bytes()):
        if len(requests) == sizes.num_prompts:
            break
        try:
            requests.append(read(parse_object(line, '{"prompt": "..."}')))
        except RequestError as error:
            problems.append(f"line {number}: {error}")
    return RequestFile(requests, problems)


def _request(entry: dict[str, Any], sizes: Sizes, writer: Writer, seed: str) -> TextRequest:
    num_out = sizes.output_len or _int_of(entry, _OUTPUT_KEYS) or _DEFAULT_OUTPUT
    at = _timestamp(entry, in_ms=not _has_text(entry))
    adapter = entry.get("adapter")
    if adapter is not None and not isinstance(adapter, str):
        raise RequestError('"adapter" is not a string')
    if not _has_text(entry):
        return TextRequest(
            num_out, prompt=_text_of_hashes(entry, writer, seed), at=at, adapter=adapter
        )
    if "messages" in entry:
        return TextRequest(num_out, _messages(entry["messages"]), at=at, adapter=adapter)
    return TextRequest(num_out, prompt=_prompt(entry["prompt"]), at=at, adapter=adapter)


def _has_text(entry: dict[str, Any]) -> bool:
    return "prompt" in entry or "messages" in entry


def _timestamp(entry: dict[str, Any], in_ms: bool) -> float:
    """Timestamp in seconds. Traces with lengths instead of texts use milliseconds."""
    value = entry.get("timestamp", 0.0)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise RequestError(f'"timestamp" is {value!r:.40}, expected a number of at least 0')
    return value / 1e3 if in_ms else float(value)


def _int_of(entry: dict[str, Any], keys: tuple[str, ...]) -> int | None:
    for key in keys:
        if key in entry:
            value = entry[key]
            if type(value) is not int or value < 1:
                raise RequestError(f'"{key}" is {value!r:.40}, expected an integer above 0')
            return value
    return None


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return tuple(value)
    raise RequestError('"prompt" must be a non-empty text or list of token ids')


def _messages(value: Any) -> tuple[Message, ...]:
    return tuple(
        {"role": item["role"], "content": item["content"]} for item in check_messages(value)
    )


def _text_of_hashes(entry: dict[str, Any], writer: Writer, seed: str) -> str:
    """Text for a trace that gives block hashes instead of text: equal hashes, equal text."""
    length = _int_of(entry, ("input_length", "input_len"))
    if length is None:
        raise RequestError('has neither "prompt" nor "messages" nor "input_length"')
    hashes = entry.get("hash_ids", [])
    if not isinstance(hashes, list):
        raise RequestError('"hash_ids" is not a list')
    texts, left = [], length
    for item in hashes:
        if left <= 0:
            break
        texts.append(writer.prose(Random(f"{seed} {item}"), min(left, _HASH_TOKENS)))
        left -= _HASH_TOKENS
    if left > 0:
        texts.append(writer.prose(Random(f"{seed} {entry!r}"), left))
    return "\n\n".join(texts)


def _sharegpt(path: Path, sizes: Sizes, writer: Writer, seed: str) -> RequestFile:
    """The first turn of randomly drawn conversations, with outputs as long as their answers."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"--dataset-path {path}: is not JSON: {error.msg} at line {error.lineno}."
        ) from error
    if not isinstance(entries, list):
        raise ConfigError(f"--dataset-path {path}: is not a list of conversations.")
    requests: list[TextRequest] = []
    problems: list[str] = []
    numbered = list(enumerate(entries, 1))
    Random(f"sharegpt {seed}").shuffle(numbered)
    for number, entry in numbered:
        if len(requests) == sizes.num_prompts:
            break
        try:
            question, answer = _first_turn(entry)
        except RequestError as error:
            problems.append(f"conversation {number}: {error}")
            continue
        num_out = sizes.output_len or writer.num_tokens(answer)
        requests.append(TextRequest(num_out, prompt=question))
    return RequestFile(requests, problems)


def _first_turn(entry: Any) -> tuple[str, str]:
    turns = (
        entry.get("conversations", entry.get("conversation")) if isinstance(entry, dict) else None
    )
    if not isinstance(turns, list) or len(turns) < 2:
        raise RequestError('has no "conversations" of at least two turns')
    question, answer = (turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2])
    if not (isinstance(question, str) and question.strip() and isinstance(answer, str)):
        raise RequestError('its first two turns have no "value" of text')
    return question, answer


FILE_FORMATS: dict[str, Callable[[Path, Sizes, Writer, str], RequestFile]] = {
    "custom": _custom,
    "timed_trace": _timed_trace,
    "sharegpt": _sharegpt,
}
