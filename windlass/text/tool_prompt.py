"""Describes tools in plain messages, for models whose chat template knows none.

Calls have the form of text/parsing/json_calls.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

_INTRODUCTION = """You can call tools. To call tools, answer with a JSON array of calls and nothing else:
[{"name": "tool name", "arguments": {"parameter": "value"}}]
Otherwise answer in plain text. The tools are:"""


def with_tools(messages: Sequence[Message], tools: Sequence[Message]) -> list[Message]:
    """Add a description of the tools to the system message."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    description = "\n".join([_INTRODUCTION, *lines])
    if messages and messages[0]["role"] in ("system", "developer"):
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{description}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": description}, *messages]


def calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """Write the calls of assistant messages into their content, and results into user messages."""
    return [_as_text(message) for message in messages]


def _as_text(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"The tool returned:\n{message['content']}"}
    if not message.get("tool_calls"):
        return message
    calls = [
        {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in message["tool_calls"]
    ]
    text = json.dumps(calls, ensure_ascii=False)
    content = f"{message['content']}\n{text}" if message["content"] else text
    return {"role": message["role"], "content": content}
