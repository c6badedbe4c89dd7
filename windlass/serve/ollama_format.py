"""Responses in the format of Ollama's API: JSON objects, one per line."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from windlass.serve.formatters import Json
from windlass.serve.media import JSON_LINES
from windlass.serve.prepare import Prepared
from windlass.serve.problems import Problem
from windlass.text.completion import Completion, Delta
from windlass.text.parsing.output import ParsedMessage, ToolCall
from windlass.text.parsing.parser import OutputParser


class OllamaFormat:
    """Formats the responses of /api/chat, and with `is_chat` False of /api/generate.

    A call is sent when it is complete: its arguments are an object.
    """

    usage_in_events = False
    media_type = JSON_LINES

    def __init__(self, prepared: Prepared, model: str, *, is_chat: bool) -> None:
        self._parser = OutputParser(prepared.parsing)
        self._model = model
        self._is_chat = is_chat
        self._began = time.monotonic()
        self._first_s: float | None = None
        self._calls: list[ToolCall] = []
        self._reason = "stop"

    def whole(
        self, deltas: Mapping[int, Delta], completions: Sequence[Completion], usage: Json
    ) -> Json:
        (completion,) = completions
        parsed = self._feed(deltas[completion.index])
        return self._object(parsed, self._calls) | self._last(usage)

    def start(self, num_prompt: int) -> bytes:  # noqa: ARG002
        return b""

    def delta(self, delta: Delta, completion: Completion, usage: Json | None) -> bytes:  # noqa: ARG002
        parsed = self._feed(delta)
        if not parsed.content and not parsed.reasoning:
            return b""
        return _line(self._object(parsed, []) | {"done": False})

    def end(self, usage: Json) -> bytes:
        calls = b""
        if self._calls:
            calls = _line(self._object(ParsedMessage(), self._calls) | {"done": False})
        return calls + _line(self._object(ParsedMessage(), []) | self._last(usage))

    def error(self, problem: Problem) -> bytes:
        return _line(problem.ollama_body())

    def _feed(self, delta: Delta) -> ParsedMessage:
        if self._first_s is None:
            self._first_s = time.monotonic() - self._began
        parsed = ParsedMessage(calls=self._calls)
        parsed.add(self._parser.feed(delta.text, last=delta.finish_reason is not None))
        self._reason = delta.finish_reason or self._reason
        return parsed

    def _object(self, parsed: ParsedMessage, calls: list[ToolCall]) -> Json:
        head = {"model": self._model, "created_at": datetime.now(UTC).isoformat()}
        thinking = {"thinking": parsed.reasoning} if parsed.reasoning else {}
        if not self._is_chat:
            return {**head, "response": parsed.content, **thinking}
        message: Json = {"role": "assistant", "content": parsed.content, **thinking}
        if calls:
            message["tool_calls"] = [
                {"function": {"name": call.name, "arguments": call.values}} for call in calls
            ]
        return {**head, "message": message}

    def _last(self, usage: Json) -> Json:
        total, first = time.monotonic() - self._began, self._first_s or 0.0
        return {
            "done": True,
            "done_reason": self._reason,
            "total_duration": _nanoseconds(total),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": _nanoseconds(first),
            "eval_count": usage["completion_tokens"],
            "eval_duration": _nanoseconds(total - first),
        }


def _line(value: Json) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
