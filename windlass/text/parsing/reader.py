"""Reads text that arrives in pieces.

Parsers are generators over a reader: they are written as if the whole text were there, and yield where
it is not. What they read does not depend on where the pieces were cut: a method decides only on
characters that it has seen, or on the end of the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TypeVar

from windlass.text.parsing import model_json

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields when it needs more text, and returns a T
Sink = Callable[[str], None]

_OUTSIDE_STRING = re.compile(r'["{}\[\]]')
_INSIDE_STRING = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[\s,:\]}]")


def discard(_text: str) -> None:
    """Drop text."""


class Reader:
    """A buffer of text that was not read yet."""

    def __init__(self) -> None:
        self._rest = ""
        self._ended = False
        self._recorded: list[str] | None = None

    def push(self, text: str) -> None:
        self._rest += text

    def end(self) -> None:
        """No more text follows."""
        self._ended = True

    @contextmanager
    def recording(self) -> Iterator[list[str]]:
        """Collect all text that is read, for a parser that may find that it was something else."""
        recorded: list[str] = []
        self._recorded = recorded
        try:
            yield recorded
        finally:
            self._recorded = None

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Look ahead: what is read inside is read again behind it."""
        with self.recording() as read:
            yield
        self._rest = "".join(read) + self._rest

    def _read(self, count: int) -> str:
        text, self._rest = self._rest[:count], self._rest[count:]
        if self._recorded is not None:
            self._recorded.append(text)
        return text

    def peek(self, count: int = 1) -> Steps[str]:
        """The next characters: fewer only at the end of the text."""
        while len(self._rest) < count and not self._ended:
            yield
        return self._rest[:count]

    def skip(self, text: str) -> Steps[bool]:
        """Read `text` if it is next; returns whether it was."""
        for count in range(1, len(text) + 1):
            if (yield from self.peek(count)) != text[:count]:
                return False
        self._read(len(text))
        return True

    def spaces(self) -> Steps[str]:
        """Read whitespace."""
        found = ""
        while (next_ := (yield from self.peek())) and next_.isspace():
            found += self._read(1)
        return found

    def rest(self, sink: Sink) -> Steps[None]:
        """Read everything that follows."""
        while True:
            sink(self._read(len(self._rest)))
            if self._ended:
                return
            yield

    def until(self, *markers: str, sink: Sink = discard) -> Steps[str | None]:
        """Read up to the first of the markers, and the marker itself; None: there is none.

        Text before it goes to `sink` as soon as it cannot be the beginning of a marker.
        """
        while True:
            found = [(at, marker) for marker in markers if (at := self._rest.find(marker)) >= 0]
            first = min(found, default=None)
            open_at = len(self._rest) if self._ended else self._partial(markers)
            if first is not None and first[0] < open_at:
                sink(self._read(first[0]))
                return self._read(len(first[1]))
            sink(self._read(open_at))
            if self._ended:
                return None
            yield

    def _partial(self, markers: tuple[str, ...]) -> int:
        """Where a marker may have begun whose end has not arrived."""
        longest = max(map(len, markers)) - 1
        start = max(0, len(self._rest) - longest)
        for at in range(start, len(self._rest)):
            tail = self._rest[at:]
            if any(marker.startswith(tail) for marker in markers):
                return at
        return len(self._rest)

    def word(self, pattern: str) -> Steps[str]:
        """Read characters that match the regular expression `pattern`, each on its own."""
        found = ""
        while (next_ := (yield from self.peek())) and re.fullmatch(pattern, next_):
            found += self._read(1)
        return found

    def json_value(self, sink: Sink) -> Steps[bool]:
        """Read one JSON value as it is written; returns whether it was complete."""
        first = yield from self.peek()
        if not first or first not in '"{[':
            return (yield from self._scalar(sink))
        depth, in_string = 0, False
        at = 0
        while True:
            pattern = _INSIDE_STRING if in_string else _OUTSIDE_STRING
            match = pattern.search(self._rest, at)
            if match is None or (match[0] == "\\" and match.end() == len(self._rest)):
                # An escape and its character are read together.
                at = len(self._rest) if match is None else match.start()
                sink(self._read(at))
                at = 0
                if self._ended:
                    sink(self._read(len(self._rest)))
                    return False
                yield
                continue
            at = match.end()
            if match[0] == "\\":
                at += 1
            elif match[0] == '"':
                in_string = not in_string
            else:
                depth += 1 if match[0] in "{[" else -1
            if depth == 0 and not in_string:
                sink(self._read(at))
                return True

    def _scalar(self, sink: Sink) -> Steps[bool]:
        """Read a number, true, false or null."""
        while True:
            match = _SCALAR_END.search(self._rest)
            if match is not None or self._ended:
                end = len(self._rest) if match is None else match.start()
                if end:
                    sink(self._read(end))
                return match is not None and end > 0
            yield


def json_text(reader: Reader) -> Steps[str]:
    """One JSON value as it is written; "" if it is not complete."""
    pieces: list[str] = []
    complete = yield from reader.json_value(pieces.append)
    return "".join(pieces) if complete else ""


def json_string(reader: Reader) -> Steps[str | None]:
    """A JSON string; None: the next value is none."""
    if (yield from reader.peek()) != '"':
        return None
    try:
        return str(model_json.decode((yield from json_text(reader))))
    except ValueError:
        return None
