"""What a load asks for: plain requests, for a server over HTTP as for an engine in the same process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

Message = dict[str, str]  # role and content


@dataclass(frozen=True, slots=True)
class Ask:
    """One request before it is sent: a conversation, or a prompt of text or token ids."""

    max_tokens: int
    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] = ""
    at: float = 0.0  # seconds after the load's start; 0 where arrivals are drawn later
    # The number of the ask whose answer must have come first: an earlier turn of a conversation.
    follows: int | None = None
    adapter: str | None = None

    def as_messages(self) -> list[Message]:
        """For a chat endpoint; a prompt of text is what a user says."""
        if self.messages:
            return list(self.messages)
        assert isinstance(self.prompt, str), "token ids are no conversation"
        return [{"role": "user", "content": self.prompt}]

    def as_prompt(self) -> str | list[int]:
        """For a completions endpoint; a conversation becomes its texts, one after the other."""
        if self.messages:
            return "\n\n".join(message["content"] for message in self.messages)
        return self.prompt if isinstance(self.prompt, str) else list(self.prompt)


def fingerprint(asks: Sequence[Ask]) -> str:
    """Tells whether two runs asked the same, arrivals apart."""
    kept = [{**asdict(ask), "at": 0.0} for ask in asks]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]
