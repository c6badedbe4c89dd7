"""An append-only JSONL file of token lists by number, which survives a kill.

The first line holds the options that the lists depend on; a file with other options is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from windlass.errors import ConfigError, EngineError
from windlass.tools.resumable import describe_changes


class TokenLog:
    """Owns the open file. `found` holds its entries, without a truncated last line."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self.found: dict[int, list[int]] = {}
        options = json.loads(json.dumps(about))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            raw = path.read_bytes() if path.exists() else b""
            whole = raw[: raw.rfind(b"\n") + 1]
            lines = whole.splitlines()
            if lines:
                self._check(lines[0], options)
                for line in lines[1:]:
                    entry = json.loads(line)
                    self.found[entry["number"]] = entry["tokens"]
            self._file: BinaryIO = path.open("r+b" if raw else "wb")
            self._file.truncate(len(whole))
            self._file.seek(0, os.SEEK_END)
            if not lines:
                self._write(json.dumps({"about": options}))
                self.flush()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}.") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}: is damaged, or no file of train-draft ({error!r}). Remove it."
            ) from error

    def _check(self, line: bytes, options: dict[str, Any]) -> None:
        changes = describe_changes(json.loads(line)["about"], options)
        if changes:
            raise ConfigError(
                f"{self.path} was started with other options: {changes}. Run the same command to "
                "resume, or remove that file."
            )

    def add(self, number: int, tokens: list[int]) -> None:
        self.found[number] = tokens
        try:
            self._write(json.dumps({"number": number, "tokens": tokens}, separators=(",", ":")))
        except OSError as error:
            raise self._cannot_write(error) from error

    def flush(self) -> None:
        """Write all entries to the disk, so that a kill loses none of them."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._cannot_write(error) from error

    def close(self) -> None:
        self._file.close()

    def _write(self, line: str) -> None:
        self._file.write(line.encode() + b"\n")

    def _cannot_write(self, error: OSError) -> EngineError:
        return EngineError(
            f"{self.path}: cannot be written: {error.strerror or error}. {len(self.found)} texts "
            "were generated, and nearly all of them are kept there. Free some space, then run the "
            "same command again to resume."
        )
