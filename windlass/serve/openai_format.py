"""Responses in OpenAI's format: the envelope around the choices, whole and as server-sent events."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec

from windlass.serve.formatters import Formatter, Json
from windlass.serve.media import EVENT_STREAM
from windlass.serve.problems import Problem
from windlass.serve.protocol import GenerationRequest, StreamOptions
from windlass.text.completion import Completion, Delta
from windlass.version import __version__

# Clients that compare outputs of one seed look at it: other versions may compute otherwise.
FINGERPRINT = f"windlass-{__version__}"
_DONE = b"data: [DONE]\n\n"
_PLACEHOLDER = "\0"
_PLACEHOLDER_JSON = msgspec.json.encode(_PLACEHOLDER)


def event(value: Json) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class OpenAIFormat:
    """Formats the responses of /v1/chat/completions and /v1/completions."""

    media_type = EVENT_STREAM

    def __init__(
        self,
        formatter: Formatter,
        *,
        body: GenerationRequest,
        response_id: str,
        model: str,
        force_usage: bool,
    ) -> None:
        options = body.stream_options or StreamOptions()
        self._formatter = formatter
        self._usage_at_end = options.include_usage or force_usage
        self.usage_in_events = options.continuous_usage_stats
        self._is_plain = formatter.is_plain and not self.usage_in_events
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # JSON around the text, per choice
        self._response_id = response_id
        self._created = int(time.time())
        self._model = model

    def whole(
        self, deltas: Mapping[int, Delta], completions: Sequence[Completion], usage: Json
    ) -> Json:
        choices = [self._formatter.whole(deltas[each.index], each) for each in completions]
        return {
            **self._envelope(self._formatter.whole_object),
            "choices": choices,
            "usage": self._with_reasoning(usage),
            **self._formatter.extra(completions),
        }

    def start(self, num_prompt: int) -> bytes:  # noqa: ARG002
        return b""

    def delta(self, delta: Delta, completion: Completion, usage: Json | None) -> bytes:
        """Encode a delta. In mid-stream, events differ only in their text."""
        if not self._is_plain or delta.first or delta.finish_reason or not delta.text:
            return self._encode(delta, completion, usage)
        frame = self._frames.get(delta.index)
        if frame is None:
            # The JSON around the text is encoded once. No client-chosen value follows the text.
            encoded = self._encode(Delta(delta.index, _PLACEHOLDER), completion, usage)
            head, _, tail = encoded.rpartition(_PLACEHOLDER_JSON)
            frame = self._frames[delta.index] = head, tail
        return frame[0] + msgspec.json.encode(delta.text) + frame[1]

    def _encode(self, delta: Delta, completion: Completion, usage: Json | None) -> bytes:
        choices = self._formatter.chunks(delta, completion)
        return b"".join(self._event([choice], usage) for choice in choices)

    def _event(self, choices: list[Json], usage: Json | None) -> bytes:
        chunk = {**self._envelope(self._formatter.chunk_object), "choices": choices}
        if self._usage_at_end or self.usage_in_events:
            chunk["usage"] = usage
        return event(chunk)

    def _envelope(self, object_name: str) -> Json:
        return {
            "id": self._response_id,
            "object": object_name,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": FINGERPRINT,
        }

    def end(self, usage: Json) -> bytes:
        if not self._usage_at_end:
            return _DONE
        return self._event([], self._with_reasoning(usage)) + _DONE

    def _with_reasoning(self, usage: Json) -> Json:
        count = self._formatter.num_reasoning_tokens()
        if not count:
            return usage
        details = usage.get("completion_tokens_details", {}) | {"reasoning_tokens": count}
        return usage | {"completion_tokens_details": details}

    def error(self, problem: Problem) -> bytes:
        return event(problem.body())
