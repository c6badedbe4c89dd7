"""Reads the lines of a batch: one JSON request per line, in OpenAI's format.

A file is scanned once, for errors with line numbers. Lines are read again when they run: a file may
be larger than the memory for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from windlass.errors import RequestError
from windlass.serve.abbreviate import abbreviate

MAX_CUSTOM_ID_CHARS = 512
_MAX_ERRORS = 100
_ENVELOPE_BYTES = 4 * 2**10  # of a line beside its body
_BOM = b"\xef\xbb\xbf"

CheckModel = Callable[[str | None], object]


class LineError(msgspec.Struct, frozen=True):
    """Why a file cannot run. `line` counts from 1; None: the file as a whole."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch. `index` counts the requests from 0; empty lines do not count."""

    index: int
    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True, slots=True)
class LineRules:
    """What a line may be. `check_model` raises RequestError for a model that does not exist."""

    urls: Collection[str]
    max_body_bytes: int
    check_model: CheckModel = lambda _name: None
    max_lines: int | None = None

    @property
    def max_line_bytes(self) -> int:
        return self.max_body_bytes + _ENVELOPE_BYTES


@dataclass(slots=True)
class Scan:
    """The byte offsets of a file's requests, and its first errors."""

    offsets: array[int] = field(default_factory=lambda: array("Q"))
    errors: list[LineError] = field(default_factory=list)


class _Envelope(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _BodyHead(msgspec.Struct):
    model: Any = None
    stream: Any = None


class _LineRefused(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


def scan(path: Path, rules: LineRules) -> Scan:
    """Find the requests of a file and check them; all lines are checked, up to 100 errors."""
    found, ids = Scan(), set[str]()
    for number, offset, raw in _raw_lines(path, rules.max_line_bytes):
        found.offsets.append(offset)
        if rules.max_lines is not None and len(found.offsets) > rules.max_lines:
            message = f"the file has more than {rules.max_lines:,} requests."
            found.errors.append(LineError("too_many_requests", message, number))
            break
        try:
            _check(raw, rules, ids)
        except _LineRefused as error:
            found.errors.append(LineError(error.code, str(error), number, error.param))
            if len(found.errors) == _MAX_ERRORS:
                break
    if not found.offsets:
        found.errors.append(LineError("empty_file", "the file has no requests."))
    return found


def read_lines(
    path: Path, offsets: Sequence[int], indices: Sequence[int], max_line_bytes: int
) -> list[BatchLine]:
    """Read requests of a file that was scanned."""
    lines = []
    with path.open("rb") as file:
        for index in indices:
            file.seek(offsets[index])
            envelope = msgspec.json.decode(file.readline(max_line_bytes), type=_Envelope)
            lines.append(BatchLine(index, envelope.custom_id, envelope.url, bytes(envelope.body)))
    return lines


def _raw_lines(path: Path, max_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield number, offset and bytes of each line that is not empty; a longer one is cut."""
    with path.open("rb") as file:
        number, offset = 1, len(_BOM) if file.read(len(_BOM)) == _BOM else 0
        file.seek(offset)
        while raw := file.readline(max_bytes + 1):
            if raw.strip():
                yield number, offset, raw
            while raw and not raw.endswith(b"\n"):
                raw = file.readline(max_bytes)
            number, offset = number + 1, file.tell()


def _check(raw: bytes, rules: LineRules, ids: set[str]) -> None:
    """Raise _LineRefused unless the line is a request; adds its custom_id to `ids`."""
    if len(raw) > rules.max_line_bytes:
        limit = rules.max_body_bytes
        raise _LineRefused("line_too_long", f"the line is longer than {limit:,} bytes.")
    try:
        envelope = msgspec.json.decode(raw, type=_Envelope)
        if not bytes(envelope.body).startswith(b"{"):
            raise _LineRefused("invalid_request", "body must be a JSON object.", "body")
        head = msgspec.json.decode(envelope.body, type=_BodyHead)
    except msgspec.ValidationError as error:
        raise _LineRefused(
            "missing_required_parameter",
            f"{error}. A line needs custom_id, method, url and body.",
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _LineRefused("invalid_json_line", f"this line is not valid JSON: {error}.") from None
    _check_envelope(envelope, rules, ids)
    if head.stream:
        raise _LineRefused("invalid_request", "stream is not available in a batch.", "body.stream")
    if isinstance(head.model, str):
        try:
            rules.check_model(head.model)
        except RequestError as error:
            raise _LineRefused("model_not_found", str(error), "body.model") from None


def _check_envelope(envelope: _Envelope, rules: LineRules, ids: set[str]) -> None:
    custom_id = envelope.custom_id
    if not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise _LineRefused(
            "invalid_custom_id",
            f"custom_id must have 1 to {MAX_CUSTOM_ID_CHARS} characters, got {len(custom_id):,}.",
            "custom_id",
        )
    if custom_id in ids:
        raise _LineRefused(
            "duplicate_custom_id",
            f"the custom_id {abbreviate(custom_id)} was used on an earlier line.",
            "custom_id",
        )
    ids.add(custom_id)
    if envelope.method != "POST":
        message = f"method must be POST, got {abbreviate(envelope.method)}."
        raise _LineRefused("invalid_method", message, "method")
    if envelope.url not in rules.urls:
        raise _LineRefused(
            "invalid_url",
            f"url must be {' or '.join(sorted(rules.urls))}, got {abbreviate(envelope.url)}.",
            "url",
        )
