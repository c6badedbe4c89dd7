"""Responses in the format of OpenAI's Responses API: output items, and events for each of their parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from windlass.core.tokenizer import Tokenizer
from windlass.serve.formatters import Json, num_reasoning_tokens
from windlass.serve.media import EVENT_STREAM
from windlass.serve.prepare import Prepared
from windlass.serve.problems import Problem
from windlass.serve.responses_api import ResponsesRequest
from windlass.text.completion import Completion, Delta
from windlass.text.parsing.output import (
    CallArguments,
    CallStart,
    ContentText,
    Event,
    ReasoningText,
)
from windlass.text.parsing.parser import OutputParser

Store = Callable[[Json, list[Json]], None]  # a finished response, and its messages

ID_PREFIX = "resp_"
_REQUEST_FIELDS = (
    "instructions",
    "max_output_tokens",
    "previous_response_id",
    "temperature",
    "top_p",
)


class _Items:
    """The output items so far; each change of them is an event."""

    def __init__(self, unique: str) -> None:
        self._unique = unique
        self.items: list[Json] = []
        self._open = ""  # kind of the last item; "": it is complete
        self._number = -1  # of the last event

    def event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        data = msgspec.json.encode({"type": kind, "sequence_number": self._number, **fields})
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def add(self, event: Event) -> bytes:
        match event:
            case ContentText(text):
                head = self._begin("message", {"role": "assistant", "content": []})
                return head + self._text("output_text", text)
            case ReasoningText(text):
                head = self._begin("reasoning", {"summary": [], "content": []})
                return head + self._text("reasoning_text", text)
            case CallStart(_, id_, name):
                call = {"call_id": id_, "name": name, "arguments": ""}
                return self.complete() + self._begin("function_call", call)
            case CallArguments(_, text):
                self.items[-1]["arguments"] += text
                return self._of_item("response.function_call_arguments.delta", delta=text)

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        index = len(self.items) - 1
        return self.event(kind, item_id=self.items[-1]["id"], output_index=index, **fields)

    def _begin(self, kind: str, fields: Json) -> bytes:
        """Begin an item, unless one of this kind is open; a text has one part."""
        if kind == self._open:
            return b""
        closed = self.complete()
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        id_ = f"{prefix}_{self._unique}{len(self.items)}"
        self._open = kind
        self.items.append({"id": id_, "type": kind, "status": "in_progress", **fields})
        added = self.event(
            "response.output_item.added", output_index=len(self.items) - 1, item=self.items[-1]
        )
        if kind == "function_call":
            return closed + added
        part: Json = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        begun = self._of_item("response.content_part.added", content_index=0, part=part)
        self.items[-1]["content"] = [part]
        return closed + added + begun

    def _text(self, kind: str, text: str) -> bytes:
        self.items[-1]["content"][0]["text"] += text
        fields: Json = {"logprobs": []} if kind == "output_text" else {}
        return self._of_item(f"response.{kind}.delta", content_index=0, delta=text, **fields)

    def complete(self, status: str = "completed") -> bytes:
        """Complete the last item."""
        if not self._open:
            return b""
        kind, self._open = self._open, ""
        item = self.items[-1]
        item["status"] = status
        if kind == "function_call":
            done = self._of_item(
                "response.function_call_arguments.done",
                name=item["name"],
                arguments=item["arguments"],
            )
        else:
            (part,) = item["content"]
            fields: Json = {"logprobs": []} if kind == "message" else {}
            done = self._of_item(
                f"response.{part['type']}.done", content_index=0, text=part["text"], **fields
            ) + self._of_item("response.content_part.done", content_index=0, part=part)
        last = len(self.items) - 1
        return done + self.event("response.output_item.done", output_index=last, item=item)


class ResponsesFormat:
    """Formats the responses of /v1/responses."""

    usage_in_events = False
    media_type = EVENT_STREAM

    def __init__(
        self,
        body: ResponsesRequest,
        prepared: Prepared,
        *,
        model: str,
        tokenizer: Tokenizer,
        store: Store,
    ) -> None:
        self._body = body
        self._parser = OutputParser(prepared.parsing)
        self._tokenizer = tokenizer
        self._store = store
        self._id = prepared.response_id
        self._items = _Items(self._id.removeprefix(ID_PREFIX))
        self._model = model
        self._created = time.time()
        self._is_cut = False

    def whole(
        self, deltas: Mapping[int, Delta], completions: Sequence[Completion], usage: Json
    ) -> Json:
        (completion,) = completions
        self.delta(deltas[completion.index], completion, None)
        return self._finished(usage)

    def start(self, num_prompt: int) -> bytes:  # noqa: ARG002
        response = self._response("in_progress", None)
        return self._items.event("response.created", response=response) + self._items.event(
            "response.in_progress", response=response
        )

    def delta(self, delta: Delta, completion: Completion, usage: Json | None) -> bytes:  # noqa: ARG002
        is_last = delta.finish_reason is not None
        events = b"".join(map(self._items.add, self._parser.feed(delta.text, last=is_last)))
        if is_last:
            self._is_cut = delta.finish_reason == "length"
            if not self._items.items:
                events += self._items.add(ContentText(""))
            events += self._items.complete("incomplete" if self._is_cut else "completed")
        return events

    def end(self, usage: Json) -> bytes:
        response = self._finished(usage)
        return self._items.event(f"response.{response['status']}", response=response)

    def error(self, problem: Problem) -> bytes:
        fields = {"code": problem.code, "message": problem.message, "param": problem.param}
        return self._items.event("error", **fields)

    def _finished(self, usage: Json) -> Json:
        response = self._response("incomplete" if self._is_cut else "completed", usage)
        if self._body.store is not False:
            self._store(response, self._items.items)
        return response

    def _usage(self, usage: Json) -> Json:
        count = num_reasoning_tokens(self._parser, self._tokenizer)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": count},
            "total_tokens": usage["total_tokens"],
        }

    def _response(self, status: str, usage: Json | None) -> Json:
        body = self._body
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        effort = None if body.reasoning is None else body.reasoning.effort
        text = None if body.text is None else body.text.format
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "model": self._model,
            "output": self._items.items,
            "usage": None if usage is None else self._usage(usage),
            **{name: getattr(body, name) for name in _REQUEST_FIELDS},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": {"effort": effort, "summary": None},
            "store": body.store is not False,
            "text": {"format": text or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "truncation": body.truncation or "disabled",
            "metadata": (body.model_extra or {}).get("metadata") or {},
        }
