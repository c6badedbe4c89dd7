"""Requests of a workload, as text for a server or as token ids for an in-process engine, and their timing.

Timings are independent of HTTP and of the engine. All times are seconds of one clock, such as
`time.perf_counter`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

Message = dict[str, str]  # role and content


@dataclass(frozen=True, slots=True)
class Request:
    """One request in token ids. It generates exactly `num_output` tokens."""

    prompt: list[int]
    num_output: int
    at: float = 0.0  # seconds after the start
    follows: int | None = None  # index of the request that must finish first
    temperature: float = 0.0
    deterministic: bool = False
    adapter: str = ""


def max_request_len(requests: Sequence[Request]) -> int:
    """Prompt and output tokens of the longest request."""
    return max(len(request.prompt) + request.num_output for request in requests)


@dataclass(frozen=True, slots=True)
class TextRequest:
    """One request as text: a conversation, or a prompt as text or token ids."""

    max_tokens: int
    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] = ""
    at: float = 0.0  # seconds after the start; 0 until arrival times are assigned
    # Index of the request that must finish first: the previous turn of the conversation.
    follows: int | None = None
    adapter: str | None = None

    def as_messages(self) -> list[Message]:
        """Messages for a chat endpoint. A text prompt becomes a user message."""
        if self.messages:
            return list(self.messages)
        assert isinstance(self.prompt, str), "token ids cannot be sent as messages"
        return [{"role": "user", "content": self.prompt}]

    def as_prompt(self) -> str | list[int]:
        """Prompt for a completions endpoint. The messages of a conversation are joined."""
        if self.messages:
            return "\n\n".join(message["content"] for message in self.messages)
        return self.prompt if isinstance(self.prompt, str) else list(self.prompt)


def fingerprint(requests: Sequence[TextRequest]) -> str:
    """Hash of the requests without their arrival times, to compare two runs."""
    untimed = [{**asdict(request), "at": 0.0} for request in requests]
    return hashlib.sha256(json.dumps(untimed, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Timing:
    """One finished request. A failed request has an `error`, and the data received before it.

    due_at     scheduled arrival             |
    sent_at    sent                          |.|      after due_at when concurrency is limited
    times[0]   first tokens received         |.|..|
    times[-1]  last tokens received          |.|..|.|.|.|
    ended_at   response complete             |.|..|.|.|.||
    """

    due_at: float
    sent_at: float
    ended_at: float
    num_prompt: int
    num_output: int
    times: tuple[float, ...] = ()  # of every chunk with tokens
    tokens: tuple[int, ...] = ()  # tokens of each of these chunks
    error: str | None = None
    num_rejected: int = 0  # responses with status 429
    num_cached: int | None = None  # prompt tokens from the prefix cache; None: not reported
    text: str = field(default="", repr=False)

    @property
    def is_good(self) -> bool:
        return self.error is None

    @property
    def first_at(self) -> float | None:
        return self.times[0] if self.times else None

    @property
    def ttft(self) -> float | None:
        """Seconds from sending to the first token."""
        return self.times[0] - self.sent_at if self.times else None

    @property
    def e2el(self) -> float:
        """Seconds from sending to the last token, or to the end when there were no tokens."""
        return (self.times[-1] if self.times else self.ended_at) - self.sent_at

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None for fewer than two tokens."""
        if self.num_output < 2 or not self.times:
            return None
        return (self.times[-1] - self.times[0]) / (self.num_output - 1)

    @property
    def itls(self) -> list[float]:
        """Seconds between consecutive chunks, independent of their token counts."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]
