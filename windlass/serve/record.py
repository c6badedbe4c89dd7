"""Writes some of the real traffic as calibration data for `windlass quantize`: JSONL of conversations.

Only when asked for. Kept are roles and texts; keys, users, ids, names and every other field of a
request are not. What people write inside a text is not looked at.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from windlass.config import ServeConfig
from windlass.core.tokenizer import Tokenizer
from windlass.errors import ConfigError
from windlass.serve.prepare import Prepared
from windlass.serve.protocol import ChatRequest, CompletionRequest, Generation
from windlass.text.completion import Completion

_log = logging.getLogger("windlass.serve")

_DENOMINATOR = 2**64


class Recorder:
    """Appends answered requests to a file, until it is full. Owns the open file."""

    def __init__(self, path: Path, share: float, max_bytes: int, tokenizer: Tokenizer) -> None:
        self._path = path
        self._share = share
        self._max_bytes = max_bytes
        self._tokenizer = tokenizer
        self._open = True
        self._lock = threading.RLock()  # answers are recorded by several threads
        try:
            # Texts of users: nobody but the server's own account may read them.
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            self._num_bytes = os.fstat(self._file).st_size
        except OSError as error:
            raise ConfigError(
                f"--record-traffic {path}: cannot be written: {error.strerror or error}."
            ) from error
        _log.info("recording %g of the traffic to %s, up to %d bytes", share, path, max_bytes)

    def answered(
        self, body: Generation, prepared: Prepared, completions: Sequence[Completion]
    ) -> None:
        """Write a request that was answered, when it is among the chosen share."""
        if not self._open or not self.chooses(prepared.answer_id):
            return
        records = _records(body, prepared, completions, self._tokenizer)
        with self._lock:
            self._write(b"".join(msgspec.json.encode(record) + b"\n" for record in records))

    def _write(self, text: bytes) -> None:
        if not self._open:
            return
        if self._num_bytes + len(text) > self._max_bytes:
            self._stop(f"has reached --record-max-bytes ({self._max_bytes})")
            return
        try:
            written = os.write(self._file, text)
        except OSError as error:
            self._stop(f"cannot be written: {error.strerror or error}")
            return
        self._num_bytes += written
        if written < len(text):
            self._stop("took only a part of the last line: the disk is full")

    def chooses(self, request_id: str) -> bool:
        """Whether a request is of the share: decided by its id alone, so it can be repeated."""
        digest = blake2b(request_id.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") < self._share * _DENOMINATOR

    def close(self) -> None:
        """Give the file back; closing twice changes nothing."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
            self._open = False

    def _stop(self, why: str) -> None:
        """Requests go on being answered: a record is not worth an error to a client."""
        _log.warning("recording ends: %s %s", self._path, why)
        self.close()


def make_recorder(config: ServeConfig, tokenizer: Tokenizer) -> Recorder | None:
    """The recorder that was asked for; None: nothing is recorded."""
    if config.record_traffic is None:
        return None
    path = Path(config.record_traffic).expanduser()
    return Recorder(path, config.record_share, config.record_max_bytes, tokenizer)


def _records(
    body: Generation, prepared: Prepared, completions: Sequence[Completion], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """One record per prompt, with the first of its answers."""
    if isinstance(body, ChatRequest):
        messages = [{"role": each.role, "content": each.content or ""} for each in body.messages]
        if body.continue_final_message:
            messages[-1]["content"] += completions[0].text
        else:
            messages.append({"role": "assistant", "content": completions[0].text})
        return [{"messages": messages}]
    assert isinstance(body, CompletionRequest)
    step = prepared.sampling.n
    texts = [
        prompt.text if prompt.text is not None else tokenizer.decode(prompt.tokens)
        for prompt in prepared.prompts
    ]
    return [{"text": text + completions[i * step].text} for i, text in enumerate(texts)]
