"""Requests of a workload before they are sent: as text for a server, as token ids for an engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

Message = dict[str, str]  # role and content


@dataclass(frozen=True, slots=True)
class Request:
    """One request in token ids. It ends after exactly `num_output` tokens."""

    prompt: list[int]
    num_output: int
    at: float = 0.0  # seconds after the start
    follows: int | None = None  # the index of the request that must have ended before
    temperature: float = 0.0
    deterministic: bool = False
    adapter: str = ""


def longest(requests: Sequence[Request]) -> int:
    """Tokens of the longest request, prompt and output."""
    return max(len(request.prompt) + request.num_output for request in requests)


@dataclass(frozen=True, slots=True)
class TextRequest:
    """One request as text: a conversation, or a prompt of text or token ids."""

    max_tokens: int
    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] = ""
    at: float = 0.0  # seconds after the start; 0 where arrivals are drawn later
    # The index of the request that must have ended before: an earlier turn of the conversation.
    follows: int | None = None
    adapter: str | None = None

    def as_messages(self) -> list[Message]:
        """For a chat endpoint. A text prompt becomes a user message."""
        if self.messages:
            return list(self.messages)
        assert isinstance(self.prompt, str), "token ids cannot be sent as messages"
        return [{"role": "user", "content": self.prompt}]

    def as_prompt(self) -> str | list[int]:
        """For a completions endpoint. The texts of a conversation are joined."""
        if self.messages:
            return "\n\n".join(message["content"] for message in self.messages)
        return self.prompt if isinstance(self.prompt, str) else list(self.prompt)


def fingerprint(requests: Sequence[TextRequest]) -> str:
    """Equal for two runs that sent the same requests, at whatever times."""
    kept = [{**asdict(request), "at": 0.0} for request in requests]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]
