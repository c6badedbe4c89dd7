"""Records a share of the traffic as calibration data for `windlass quantize`, in JSONL.

Off by default. Only roles and texts are written, not keys, users, ids, names or any other field of
a request. Texts are written as they are: personal data inside of them is not removed.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from windlass.core.tokenizer import Tokenizer
from windlass.errors import ConfigError
from windlass.serve.live_config import LiveConfig
from windlass.serve.prepare import Prepared
from windlass.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest
from windlass.text.completion import Completion

_log = logging.getLogger("windlass.serve")

_DENOMINATOR = 2**64


class Recorder:
    """Appends completed requests to a file up to a maximum size. Owns the open file.

    The share and the maximum size are those of `config` at each request.
    """

    def __init__(self, path: Path, config: LiveConfig, tokenizer: Tokenizer) -> None:
        self._path = path
        self._config = config
        self._full_at: int | None = None  # the maximum size that was reached
        self._tokenizer = tokenizer
        self._open = True
        self._lock = threading.RLock()  # several threads record
        try:
            # User texts: only the server's own account may read them.
            # O_NONBLOCK: opening a pipe would wait for its reader.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0)
            self._file = os.open(path, flags, 0o600)
            self._check_private()
        except OSError as error:
            raise ConfigError(
                f"--record-traffic {path}: cannot be written: {error.strerror or error}."
            ) from error
        share, max_bytes = config.value.record_share, config.value.record_max_bytes
        _log.info("recording %g of the traffic to %s, up to %d bytes", share, path, max_bytes)

    def _check_private(self) -> None:
        """Raise ConfigError if another user made the file, or may read it. Checked after opening."""
        status = os.fstat(self._file)
        if not hasattr(os, "geteuid"):  # Windows: its access control lists are no modes
            return
        is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not is_own or status.st_mode & 0o077:
            os.close(self._file)
            raise ConfigError(
                f"--record-traffic {self._path}: other users could read what clients send (mode "
                f"{stat.S_IMODE(status.st_mode):o}, owner {status.st_uid}). Name a new file, or run: "
                f"chmod 600 {self._path}"
            )

    def record(
        self, body: GenerationRequest, prepared: Prepared, completions: Sequence[Completion]
    ) -> None:
        """Write a completed request if it belongs to the recorded share."""
        is_full = self._full_at == self._config.value.record_max_bytes
        if not self._open or is_full or not self.chooses(prepared.response_id):
            return
        records = _records(body, prepared, completions, tokenizer=self._tokenizer)
        with self._lock:
            self._write(b"".join(msgspec.json.encode(record) + b"\n" for record in records))

    def _write(self, text: bytes) -> None:
        if not self._open:
            return
        max_bytes = self._config.value.record_max_bytes
        if os.fstat(self._file).st_size + len(text) > max_bytes:  # others append to it, too
            if self._full_at != max_bytes:
                self._full_at = max_bytes
                _log.warning(
                    "recording stops: %s has reached --record-max-bytes (%d)", self._path, max_bytes
                )
            return
        try:
            written = os.write(self._file, text)
        except OSError as error:
            self._stop(f"cannot be written: {error.strerror or error}")
            return
        if written < len(text):
            self._stop("has an incomplete last line: the disk is full")

    def chooses(self, request_id: str) -> bool:
        """Whether a request belongs to the recorded share; depends only on its id."""
        digest = blake2b(request_id.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") < self._config.value.record_share * _DENOMINATOR

    def close(self) -> None:
        """Close the file; may be called twice."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
            self._open = False

    def _stop(self, why: str) -> None:
        """Stop recording; requests are served as before."""
        _log.warning("recording stops: %s %s", self._path, why)
        self.close()


def make_recorder(config: LiveConfig, tokenizer: Tokenizer) -> Recorder | None:
    """Create the recorder of --record-traffic; None: recording is off."""
    if config.value.record_traffic is None:
        return None
    return Recorder(Path(config.value.record_traffic).expanduser(), config, tokenizer)


def _records(
    body: GenerationRequest,
    prepared: Prepared,
    completions: Sequence[Completion],
    *,
    tokenizer: Tokenizer,
) -> list[dict[str, Any]]:
    """One record per prompt, with its first completion."""
    if isinstance(body, ChatRequest):
        messages = [{"role": each.role, "content": each.content or ""} for each in body.messages]
        if body.continue_final_message:
            messages[-1]["content"] += completions[0].text
        else:
            messages.append({"role": "assistant", "content": completions[0].text})
        return [{"messages": messages}]
    assert isinstance(body, CompletionRequest)
    n = prepared.sampling.n
    texts = [
        prompt.text if prompt.text is not None else tokenizer.decode(prompt.tokens)
        for prompt in prepared.prompts
    ]
    return [{"text": text + completions[i * n].text} for i, text in enumerate(texts)]
