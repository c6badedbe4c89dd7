"""Parses a streamed response: server-sent events to times, tokens and text.

Accepts bytes split at any position. Supports OpenAI's two endpoints and the deviations of other
servers.
"""

from __future__ import annotations

from typing import Any

import msgspec


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Chunk)


class StreamBroken(Exception):
    """The stream contains an error or cannot be parsed."""


class ResponseStream:
    """Owns the received part of one response."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.is_done = False
        self.texts: list[str] = []
        self.usage: _Usage | None = None
        self._counts: list[int] = []  # cumulative tokens at each time, if the server reports them
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        """Parse bytes received at time `now`."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line.rstrip(b"\r"), now)

    def _line(self, line: bytes, now: float) -> None:
        kind, colon, value = line.partition(b":")
        if not colon or kind not in (b"data", b"error"):
            return  # an empty line, a comment or an event name
        value = value.strip()
        if value == b"[DONE]":
            self.is_done = True
            return
        try:
            chunk = _decoder.decode(value)
        except msgspec.DecodeError as error:
            raise StreamBroken(f"a chunk of the stream cannot be parsed: {error}") from error
        if chunk.error is not None or kind == b"error":
            raise StreamBroken(f"the stream contains an error: {error_text(value)}")
        self._add(chunk, now)

    def _add(self, chunk: _Chunk, now: float) -> None:
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices:
            text = _text_of(choice)
            is_end = choice.finish_reason is not None
            # In a response without text, the end is the arrival time of its only token.
            if text or (is_end and not self.times):
                self.times.append(now)
                self.texts.append(text or "")
                if chunk.usage is not None:
                    self._counts.append(chunk.usage.completion_tokens)
            if is_end:
                self.is_done = True

    @property
    def num_output(self) -> int:
        """The server's count of output tokens; without one, one token per chunk."""
        if self.usage is not None and self.usage.completion_tokens:
            return self.usage.completion_tokens
        return len(self.times)

    @property
    def num_cached(self) -> int | None:
        details = self.usage.prompt_tokens_details if self.usage is not None else None
        return details.cached_tokens if details is not None else None

    def tokens(self) -> tuple[int, ...]:
        """Tokens per chunk: the server's counts, or the total distributed evenly."""
        total, count = self.num_output, len(self.times)
        ends = [total * (i + 1) // count for i in range(count)]
        if len(self._counts) == count and self._counts == sorted(self._counts):
            ends = self._counts
        return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


def _text_of(choice: _Choice) -> str | None:
    if choice.delta is None:
        return choice.text
    delta = choice.delta
    if delta.tool_calls:
        return str(delta.tool_calls)
    return delta.content or delta.reasoning_content or delta.reasoning


def error_text(body: bytes) -> str:
    """The message of an error response, in one line."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        value = body.decode(errors="replace")
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and key in value:
            value = value[key]
    return " ".join(str(value).split())[:300] or "empty response"
