"""Reads a JSONL file of prompts. Checks every line before the model is loaded."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windlass.cli.sampling import SAMPLING_NAMES, sampling_params
from windlass.errors import RequestError
from windlass.tools.common.jsonl import check_messages, parse_object

# Not accepted: bad_token_ids is computed from bad_words, and this command always writes text.
_SAMPLING = SAMPLING_NAMES - {"bad_token_ids", "detokenize"}
_KNOWN = sorted(_SAMPLING | {"id", "prompt", "messages"})


@dataclass(frozen=True, slots=True)
class Job:
    """One line: a prompt or a conversation, and its own sampling params, which override flags."""

    id: str | int
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)


def jobs_from_file(name: str) -> list[Job]:
    """Read the jobs of a JSONL file; `-` is stdin. An error names the line number."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--prompts {name}: cannot be read: {error}.") from error
    jobs = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            jobs.append(parse_line(line, str(number)))
        except RequestError as error:
            raise RequestError(f"{name}, line {number}: {error}", error.param) from error
    if not jobs:
        raise RequestError(f"--prompts {name}: holds no prompts.")
    return jobs


def parse_line(line: str, default_id: str) -> Job:
    """Parse a line of a JSONL file. Raises RequestError if it is malformed."""
    record = parse_object(line, '{"prompt": "..."}')
    for key in record:
        if key not in _KNOWN:
            raise RequestError(_unknown(key), key)
    job_id = record.pop("id", default_id)
    if isinstance(job_id, bool) or not isinstance(job_id, (str, int)):
        raise RequestError(f"id must be a string or an integer, got {job_id!r}.", "id")
    if ("prompt" in record) == ("messages" in record):
        raise RequestError("needs either prompt or messages.", "prompt")
    prompt, messages = record.pop("prompt", None), record.pop("messages", None)
    if messages is not None:
        check_messages(messages)
    elif not isinstance(prompt, str):
        raise RequestError(f"prompt must be a string, got {prompt!r}.", "prompt")
    sampling_params(record)
    return Job(id=job_id, prompt=prompt, messages=messages, sampling=record)


def _unknown(key: str) -> str:
    near = difflib.get_close_matches(key, _KNOWN, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(_KNOWN)}."
    return f"unknown field {key!r}. {hint}"
