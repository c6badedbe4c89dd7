"""Responses in the format of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from windlass.serve.formatters import Json
from windlass.serve.media import EVENT_STREAM
from windlass.serve.prepare import Prepared
from windlass.serve.problems import Problem
from windlass.text.completion import Completion, Delta
from windlass.text.parsing.output import (
    CallArguments,
    CallStart,
    ContentText,
    Event,
    ReasoningText,
)
from windlass.text.parsing.parser import OutputParser, parse

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


def _event(kind: str, **fields: Any) -> bytes:
    data = msgspec.json.encode({"type": kind, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def _usage(usage: Json) -> Json:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
    }


def _stop(delta: Delta, has_calls: bool) -> Json:
    """Why the message ended: a stop sequence is reported with its text."""
    reason = delta.finish_reason or "stop"
    if isinstance(delta.stop_reason, str) and reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_reason}
    if has_calls and reason == "stop":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    return {"stop_reason": _STOP_REASONS.get(reason, reason), "stop_sequence": None}


ID_PREFIX = "msg_"


class AnthropicFormat:
    """Formats the responses of /v1/messages. Content blocks are numbered in order of appearance."""

    usage_in_events = False
    media_type = EVENT_STREAM

    def __init__(self, prepared: Prepared, model: str) -> None:
        self._parsing = prepared.parsing
        self._parser = OutputParser(prepared.parsing)
        self._head: Json = {
            "id": prepared.response_id,
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._index = -1  # of the last block
        self._kind = ""  # of the block that is open; "": none
        self._last: Json = {}

    def whole(
        self, deltas: Mapping[int, Delta], completions: Sequence[Completion], usage: Json
    ) -> Json:
        (completion,) = completions
        delta = deltas[completion.index]
        message = parse(delta.text, self._parsing)
        blocks: list[Json] = []
        if message.reasoning:
            blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
        if message.content or not message.calls:
            blocks.append({"type": "text", "text": message.content})
        for call in message.calls:
            head = {"type": "tool_use", "id": call.id, "name": call.name}
            blocks.append({**head, "input": call.values})
        return {
            **self._head,
            "content": blocks,
            **_stop(delta, bool(message.calls)),
            "usage": _usage(usage),
        }

    def start(self, num_prompt: int) -> bytes:
        usage = {"input_tokens": num_prompt, "output_tokens": 0}
        empty: Json = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", message={**self._head, **empty})

    def delta(self, delta: Delta, completion: Completion, usage: Json | None) -> bytes:  # noqa: ARG002
        is_last = delta.finish_reason is not None
        events = b"".join(map(self._block, self._parser.feed(delta.text, last=is_last)))
        if is_last:
            if self._index < 0:
                events += self._open("text", {"type": "text", "text": ""})
            events += self._close()
            self._last = _stop(delta, self._parser.num_calls > 0)
        return events

    def _block(self, event: Event) -> bytes:
        """The events of one piece of output, which may begin a block."""
        start: Json
        match event:
            case ContentText(text):
                head = self._open("text", {"type": "text", "text": ""})
                delta = {"type": "text_delta", "text": text}
            case ReasoningText(text):
                start = {"type": "thinking", "thinking": "", "signature": ""}
                head = self._open("thinking", start)
                delta = {"type": "thinking_delta", "thinking": text}
            case CallStart(_, id_, name):
                start = {"type": "tool_use", "id": id_, "name": name, "input": {}}
                return self._open(f"tool_use {id_}", start)
            case CallArguments(_, text):
                head, delta = b"", {"type": "input_json_delta", "partial_json": text}
        return head + _event("content_block_delta", index=self._index, delta=delta)

    def _open(self, kind: str, block: Json) -> bytes:
        """Begin a block, unless one of this kind is open."""
        if kind == self._kind:
            return b""
        closed = self._close()
        self._index, self._kind = self._index + 1, kind
        return closed + _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        self._kind = ""
        return _event("content_block_stop", index=self._index)

    def end(self, usage: Json) -> bytes:
        return _event("message_delta", delta=self._last, usage=_usage(usage)) + _event(
            "message_stop"
        )

    def error(self, problem: Problem) -> bytes:
        body = problem.anthropic_body()
        return _event(body["type"], error=body["error"])
