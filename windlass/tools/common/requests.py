"""Requests of a workload: as text for a server, as token ids for an in-process engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

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
