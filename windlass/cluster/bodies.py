"""Reads the body of an ASGI request before an application does."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from starlette.types import Message, Receive


async def read_body(receive: Receive, max_bytes: int) -> list[Message]:
    """The messages of a body; the last one is missing where the body is too large."""
    messages: list[Message] = []
    num_bytes = 0
    while num_bytes <= max_bytes:
        message = await receive()
        messages.append(message)
        num_bytes += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    return messages


def replaying(messages: Sequence[Message], receive: Receive) -> Receive:
    """A `receive` that returns `messages` first."""
    waiting = deque(messages)

    async def next_message() -> Message:
        return waiting.popleft() if waiting else await receive()

    return next_message
